/* The lengths of padded targets, from where users have them to the device; see `lengths.py`.
   `launcher.c` includes this file. */

#define WORDS 16         /* the integers of a launch, as in words.py */
#define MAX_WORDS 64     /* as LAUNCHED_WORDS in lengths.py */
#define MAX_ROWS 4       /* lengths of a call */
#define CPU 1            /* DLPack's number */
#define LIMIT (1 << 24)  /* fp32 has every integer up to here, as in words.py */

/* Return whether a tensor is one of integers in order, without gaps. */
static int is_dense(const View *view, int bits) {
    return view->dtype.code == 0 && view->dtype.bits == bits && dense_elements(view) >= 0;
}

/* Store words from a position on by launches of `store_words_kernel`; return 0 after an error. */
static int store_words(const Kernel *kernel, const float *words, Py_ssize_t size, uint64_t address,
                       int device) {
    uint64_t cells[MAX_PARAMETERS] = {0};
    void *pointers[MAX_PARAMETERS], *stream;
    int status = 0;
    if (exchange->current_stream(device_type, device, &stream)) return 0;
    for (int i = 0; i < kernel->count + 2; i++) pointers[i] = &cells[i];
    for (Py_ssize_t start = 0; start < size && !status; start += WORDS) {
        for (int i = 0; i < kernel->count; i++) {
            int arg = kernel->parameters[i].arg;
            if (arg == 0) cells[i] = address;
            else if (arg == 1) cells[i] = (uint64_t)start;
            else cells[i] = float_bits(words[start + arg - 2]);
        }
        Py_BEGIN_ALLOW_THREADS
        status = driver.launch(kernel->function, 1, 1, 1, kernel->block, 1, 1, kernel->shared,
                               stream, pointers, NULL);
        Py_END_ALLOW_THREADS
    }
    if (status) raise_driver_error(status);
    return !status;
}

/* Store the N numbers of a row on the host, a tensor, a list or a tuple, as words, and the greatest
   one; or return 0 for any other row. */
static int read_row(PyObject *row, int64_t N, float *words, int64_t *greatest) {
    View view;
    int is_list = PyList_CheckExact(row) || PyTuple_CheckExact(row);
    if (is_list ? PySequence_Fast_GET_SIZE(row) != N
                : !is_tensor(row) || exchange->describe(row, &view) || view.device.type != CPU ||
                      view.ndim != 1 || view.shape[0] != N || !is_dense(&view, 64)) {
        PyErr_Clear();
        return 0;
    }
    for (int64_t n = 0; n < N; n++) {
        int64_t number;
        if (is_list) {
            PyObject *item = PySequence_Fast_GET_ITEM(row, n);
            int overflow = 1;
            number = PyLong_CheckExact(item) ? PyLong_AsLongLongAndOverflow(item, &overflow) : 0;
            if (overflow) return 0;
        } else
            number = ((const int64_t *)(view.data + view.byte_offset))[n];
        if (number > LIMIT || number < -LIMIT) return 0;
        if (n == 0 || number > *greatest) *greatest = number;
        words[n] = (float)number;
    }
    return 1;
}

/* Fill in tensors on the device with the rows on the host, each on 16 bytes, and the greatest
   number of the last row. Return 1; 0 where Python has to do it; or -1 after an error. */
static int send_rows(PyObject *kernel, PyObject *const *rows, int count, int64_t N, int device,
                     PyObject **sent, int64_t *greatest) {
    float words[MAX_WORDS] = {0};
    int64_t step = N + N % 2;
    uint64_t address;
    if (Py_TYPE(kernel) != &kernel_type || count * step > MAX_WORDS) return 0;
    for (int i = 0; i < count; i++)
        if (!read_row(rows[i], N, words + i * step, greatest)) return 0;
    Py_ssize_t size = (count * step + WORDS - 1) / WORDS * WORDS;
    PyObject *shape = Py_BuildValue("(n)", size), *stride = Py_BuildValue("(i)", 1);
    PyObject *memory = shape && stride ? allocate_like(shape, stride, long_dtype, &address) : NULL;
    PyObject *row = memory ? Py_BuildValue("(L)", (long long)N) : NULL;
    int is_sent = row && store_words((Kernel *)kernel, words, size, address, device);
    for (int i = 0; i < count && is_sent; i++) {
        PyObject *offset = PyLong_FromLongLong(i * step);
        PyObject *arguments[] = {memory, row, stride, offset};
        if (offset) sent[i] = PyObject_VectorcallMethod(name_as_strided, arguments, 4, NULL);
        is_sent = sent[i] != NULL;
        Py_XDECREF(offset);
    }
    Py_XDECREF(row);
    Py_XDECREF(memory);
    Py_XDECREF(stride);
    Py_XDECREF(shape);
    return is_sent ? 1 : -1;
}

/* padded_lengths(kernel, targets, *rows)

   Return (N, S, longest, *lengths) for usual targets `[N, S]` and lengths `[N]`: tensors without
   gaps, int32 or int64 for targets and int64 for lengths. Without a kernel the rows are on the
   device of the targets. Otherwise they are on the host, lists and tuples of integers too, and
   `kernel` sends them. `longest` is the greatest of the last lengths where the host knows them, and
   at most S. Return NotImplemented for any others, and under transforms and modes. */
static PyObject *padded_lengths(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    int count = (int)nargs - 2, is_done = 1;
    View targets, row;
    PyObject *sent[MAX_ROWS] = {NULL}, *found = NULL;
    if (count < 1 || count > MAX_ROWS || !is_tensor(args[1]) || !is_plain() ||
        !describe_memory(args[1], &targets) || targets.ndim != 2 || targets.dtype.bits < 32 ||
        !is_dense(&targets, targets.dtype.bits))
        Py_RETURN_NOTIMPLEMENTED;
    int64_t N = targets.shape[0], longest = targets.shape[1], greatest = 0;
    int device = targets.device.index;
    if (N == 0 || !is_current(device)) Py_RETURN_NOTIMPLEMENTED;
    if (args[0] == Py_None)
        for (int i = 0; i < count && is_done; i++) {
            is_done = is_tensor(args[2 + i]) && describe_memory(args[2 + i], &row) &&
                      row.device.index == device && row.ndim == 1 && row.shape[0] == N &&
                      is_dense(&row, 64);
            sent[i] = Py_NewRef(args[2 + i]);
        }
    else {
        is_done = send_rows(args[0], args + 2, count, N, device, sent, &greatest);
        if (greatest < longest) longest = greatest < 0 ? 0 : greatest;
    }
    if (is_done == 0) found = Py_NewRef(Py_NotImplemented);
    if (is_done > 0) found = PyTuple_New(3 + count);
    if (is_done > 0 && found) {
        PyTuple_SET_ITEM(found, 0, PyLong_FromLongLong(N));
        PyTuple_SET_ITEM(found, 1, PyLong_FromLongLong(targets.shape[1]));
        PyTuple_SET_ITEM(found, 2, PyLong_FromLongLong(longest));
        for (int i = 0; i < count; i++) PyTuple_SET_ITEM(found, 3 + i, Py_NewRef(sent[i]));
    }
    for (int i = 0; i < count; i++) Py_XDECREF(sent[i]);
    return found;
}
