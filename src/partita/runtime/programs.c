/* Programs, the recorded work of ops. `launcher.c` includes this file. */

enum { LAUNCH, FILL, FORK, LEAVE, JOIN };

typedef struct { int slot; uint64_t value; } Cell;  /* slot -1: the value itself */
typedef struct {
    int kind;
    void *function;
    unsigned programs, block, shared;
    int first, count;  /* the cells of the parameters; of a fill, the cell of its address */
    uint64_t words;
} Step;

typedef struct {
    PyObject_HEAD
    int args, num_steps, uses_side_stream;
    Step *steps;
    Cell *cells;
    PyObject *allocations, *results, *keep;
} Program;

static void program_dealloc(Program *self) {
    PyMem_Free(self->steps);
    PyMem_Free(self->cells);
    Py_DECREF(self->allocations);
    Py_DECREF(self->results);
    Py_DECREF(self->keep);
    PyObject_Free(self);
}

static int read_steps(Program *self, PyObject *steps) {
    int used = 0, limit = self->args + (int)PyTuple_GET_SIZE(self->allocations);
    for (int i = 0; i < self->num_steps; i++) {
        Step *step = &self->steps[i];
        unsigned long long function;
        PyObject *cells;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(steps, i), "iKIIIKO!;expected steps of seven fields",
                              &step->kind, &function, &step->programs, &step->block, &step->shared,
                              (unsigned long long *)&step->words, &PyTuple_Type, &cells))
            return 0;
        step->function = (void *)(uintptr_t)function;
        step->first = used, step->count = (int)PyTuple_GET_SIZE(cells);
        self->uses_side_stream |= step->kind == FORK;
        if (step->count + 2 > MAX_PARAMETERS) {
            PyErr_SetString(PyExc_ValueError, "a kernel has too many parameters");
            return 0;
        }
        Cell *grown = PyMem_Realloc(self->cells, (used + step->count) * sizeof(Cell));
        if (!grown) return 0;
        self->cells = grown;
        for (int j = 0; j < step->count; j++, used++) {
            unsigned long long value;
            int slot;
            if (!PyArg_ParseTuple(PyTuple_GET_ITEM(cells, j), "iK", &slot, &value)) return 0;
            if (slot < -1 || slot >= limit) {
                PyErr_Format(PyExc_ValueError, "expected a slot below %d, got %d", limit, slot);
                return 0;
            }
            self->cells[used].slot = slot, self->cells[used].value = value;
        }
    }
    return 1;
}

/* Return whether an entry of the results names an allocation, or a view of one. */
static int is_entry(PyObject *entry, Py_ssize_t allocations) {
    if (PyTuple_Check(entry) && PyTuple_GET_SIZE(entry) == 4) entry = PyTuple_GET_ITEM(entry, 0);
    int overflow;  /* for which the number is -1 */
    long number = PyLong_Check(entry) ? PyLong_AsLongAndOverflow(entry, &overflow) : -1;
    return number >= 0 && number < allocations;
}

static int check_results(PyObject *results, PyObject *allocations) {
    Py_ssize_t count = PyTuple_GET_SIZE(allocations);
    int is_list = PyList_Check(results);
    int is_right = is_list || results == Py_None || is_entry(results, count);
    for (Py_ssize_t i = 0; is_list && is_right && i < PyList_GET_SIZE(results); i++)
        is_right = is_entry(PyList_GET_ITEM(results, i), count);
    for (Py_ssize_t i = 0; is_right && i < count; i++)
        is_right = PyTuple_CheckExact(PyTuple_GET_ITEM(allocations, i));
    if (!is_right) PyErr_SetString(PyExc_ValueError, "expected results that name allocations");
    return is_right;
}

static PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int count;
    PyObject *allocations, *results, *steps, *keep;
    if (!PyArg_ParseTuple(args, "iO!OO!O", &count, &PyTuple_Type, &allocations, &results,
                          &PyTuple_Type, &steps, &keep))
        return NULL;
    if (count < 0 || count > MAX_ARGS || count + PyTuple_GET_SIZE(allocations) > MAX_SLOTS)
        return PyErr_Format(PyExc_ValueError, "expected 0 to %d arguments and at most %d slots",
                            MAX_ARGS, MAX_SLOTS);
    Program *self = PyObject_New(Program, type);
    if (!self) return NULL;
    self->args = count, self->num_steps = (int)PyTuple_GET_SIZE(steps);
    self->uses_side_stream = 0;
    self->steps = PyMem_Calloc(self->num_steps + 1, sizeof(Step));
    self->cells = NULL;
    self->allocations = Py_NewRef(allocations), self->results = Py_NewRef(results);
    self->keep = Py_NewRef(keep);
    if (!self->steps || !check_results(results, allocations) || !read_steps(self, steps)) {
        Py_DECREF(self);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static PyTypeObject program_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "partita.runtime.Program",
    .tp_basicsize = sizeof(Program),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Program(args, allocations, results, steps, keep): an op's recorded work.",
    .tp_new = program_new,
    .tp_dealloc = (destructor)program_dealloc,
};

/* Run all steps on the stream. The caller has released the GIL. Only what a step needs of the
   arrays is written, because the stack of the thread of backward passes is in no cache. */
static int run_steps(const Program *self, const uint64_t *slots, void *main, void *side,
                     void *event) {
    uint64_t cells[MAX_PARAMETERS];
    void *pointers[MAX_PARAMETERS], *stream = main;
    int num_pointers = 0;
    for (int i = 0; i < self->num_steps; i++) {
        const Step *step = &self->steps[i];
        for (; num_pointers < step->count + 2; num_pointers++)
            pointers[num_pointers] = &cells[num_pointers];
        for (int j = 0; j < step->count; j++) {
            Cell cell = self->cells[step->first + j];
            cells[j] = cell.value + (cell.slot < 0 ? 0 : slots[cell.slot]);
        }
        /* Triton's kernels end with two pointers to scratch memory, which these do not use. */
        cells[step->count] = cells[step->count + 1] = 0;
        int status = 0;
        if (step->kind == LAUNCH)
            status = driver.launch(step->function, step->programs, 1, 1, step->block, 1, 1,
                                   step->shared, stream, pointers, NULL);
        else if (step->kind == FILL)
            status = driver.fill(cells[0], step->programs, step->words, stream);
        else if (step->kind == LEAVE)
            stream = main;
        else {
            void *before = step->kind == FORK ? main : side;
            stream = step->kind == FORK ? side : main;
            status = driver.record_event(event, before);
            if (!status) status = driver.wait_event(stream, event, 0);
        }
        if (status) return status;
    }
    return 0;
}

/* Return the result that an entry names: a tensor by its number, or a view of one. */
static PyObject *result_of(PyObject *entry, PyObject **tensors) {
    if (PyLong_Check(entry)) return Py_NewRef(tensors[PyLong_AsSsize_t(entry)]);
    PyObject *tensor = tensors[PyLong_AsSsize_t(PyTuple_GET_ITEM(entry, 0))];
    PyObject *arguments[] = {tensor, PyTuple_GET_ITEM(entry, 1), PyTuple_GET_ITEM(entry, 2),
                             PyTuple_GET_ITEM(entry, 3)};
    return PyObject_VectorcallMethod(name_as_strided, arguments, 4, NULL);
}

static PyObject *results_of(Program *self, PyObject **tensors) {
    if (self->results == Py_None) Py_RETURN_NONE;
    if (!PyList_Check(self->results)) return result_of(self->results, tensors);
    Py_ssize_t count = PyList_GET_SIZE(self->results);
    PyObject *results = PyTuple_New(count);
    for (Py_ssize_t i = 0; results && i < count; i++) {
        PyObject *result = result_of(PyList_GET_ITEM(self->results, i), tensors);
        if (!result) Py_CLEAR(results);
        else PyTuple_SET_ITEM(results, i, result);
    }
    return results;
}

/* Allocate the outputs and the workspace, run the steps, and return the results. */
static PyObject *run_program(Program *self, const Arguments *call) {
    uint64_t slots[MAX_SLOTS];
    PyObject *tensors[MAX_SLOTS], *results = NULL, *streams = NULL;
    void *stream, *side = NULL, *event = NULL;
    int allocated = 0, count = (int)PyTuple_GET_SIZE(self->allocations);
    for (int i = 0; i < self->args; i++) slots[i] = (uint64_t)(uintptr_t)call->views[i].data;
    for (; allocated < count; allocated++) {
        View view;
        PyObject *spec = PyTuple_GET_ITEM(self->allocations, allocated);
        tensors[allocated] = PyObject_Call(allocate, spec, NULL);
        if (!tensors[allocated]) goto done;
        if (exchange->describe(tensors[allocated], &view)) { allocated++; goto done; }
        slots[self->args + allocated] = (uint64_t)(uintptr_t)(view.data + view.byte_offset);
    }
    if (exchange->current_stream(device_type, call->device, &stream)) goto done;
    if (self->uses_side_stream) {
        unsigned long long side_handle, event_handle;
        streams = PyObject_CallFunction(side_stream, "i", call->device);
        if (!streams || !PyArg_ParseTuple(streams, "KK", &side_handle, &event_handle)) goto done;
        side = (void *)(uintptr_t)side_handle, event = (void *)(uintptr_t)event_handle;
    }
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = run_steps(self, slots, stream, side, event);
    if (status && side) {  /* Work that was launched there may still use the call's memory. */
        driver.record_event(event, side);
        driver.wait_event(stream, event, 0);
    }
    Py_END_ALLOW_THREADS
    if (status) raise_driver_error(status);
    else results = results_of(self, tensors);
done:
    while (allocated) Py_DECREF(tensors[--allocated]);
    Py_XDECREF(streams);
    return results;
}
