/* The calls of an op, which recorded programs replay. `launcher.c` includes this file. */

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *programs;
    PyObject *last_key;  /* that of the last call with a program, which most calls equal */
    unsigned long long by_identity;
    unsigned long long with_rows;  /* bits of the arguments whose first size is the rows */
    int num_limits;
    int64_t limits[MAX_LIMITS];    /* a class of calls has more rows than one and not the next */
} Replay;

/* The key of a call, and where it has the number of rows, if a class of calls has that number. */
typedef struct {
    Key key;
    int num_places;
    Py_ssize_t places[MAX_PLACES];
    int64_t rows;
} CallKey;

/* Add a tensor by what a plan may depend on, and by the first tensor that shares its address.
   A tensor whose values decide a plan counts by its identity, address and version too. */
static int put_tensor(Key *key, PyObject *arg, const View *views, Py_ssize_t index, int identity) {
    const View *view = &views[index];
    int64_t alias = 0, properties[2];
    while (views[alias].data != view->data) alias++;
    properties[0] = (int64_t)view->dtype.code | (int64_t)view->dtype.bits << 8 |
                    (int64_t)view->ndim << 16 | (int64_t)view->device.index << 32;
    properties[1] = (int64_t)((uintptr_t)view->data & ALIGNMENT) | alias << 8;
    if (!put_tagged(key, 't', properties, sizeof properties)) return 0;
    Py_ssize_t size = view->ndim * (Py_ssize_t)sizeof(int64_t);
    if (!put(key, view->shape, size) || !put(key, view->strides, size)) return 0;
    if (!identity) return 1;
    PyObject *version = PyObject_GetAttr(arg, name_version);
    if (!version) { PyErr_Clear(); return 0; }
    const void *place[] = {arg, view->data};
    int added = put_tagged(key, 'p', place, sizeof place) && put_value(key, version);
    Py_DECREF(version);
    return added;
}

static int is_last_key(const Replay *self, const Key *key) {
#ifdef Py_GIL_DISABLED  /* another thread may replace the last one */
    return 0;
#else
    return self->last_key && PyBytes_GET_SIZE(self->last_key) == key->used &&
           !memcmp(PyBytes_AS_STRING(self->last_key), key->bytes, key->used);
#endif
}

/* Return the key as an object. That of the last call has its hash already. */
static PyObject *key_object(const Replay *self, const Key *key) {
    if (is_last_key(self, key)) return Py_NewRef(self->last_key);
    return PyBytes_FromStringAndSize(key->bytes, key->used);
}

/* Note that the key ends with the shape and the strides of a tensor that has the rows first. */
static void note_rows(CallKey *call, const View *view) {
    if (view->ndim == 0 || call->num_places < 0) return;
    if (call->num_places == 0) call->rows = view->shape[0];
    if (view->shape[0] != call->rows || call->num_places == MAX_PLACES)
        call->num_places = -1;  /* no class has such a call */
    else
        call->places[call->num_places++] = call->key.used - 2 * view->ndim * sizeof(int64_t);
}

/* Describe the tensors of a call and make its key; return 0 where the call cannot be replayed. An
   argument that is NULL is described already. */
static int put_call(const Replay *self, CallKey *call, PyObject *const *args, Py_ssize_t nargs,
                    Operands *operands) {
    Key *key = &call->key;
    View *views = operands->views;
    int *device = &operands->device;
    key->used = call->num_places = 0, operands->rows = 0, *device = -1;
    if (nargs > MAX_ARGS || nargs == 0 || !is_tensor(args[0])) return 0;
    for (Py_ssize_t i = 0; i < nargs; i++) {
        if (args[i] && !is_tensor(args[i])) {
            if (!is_constant(args[i]) && !PyList_CheckExact(args[i])) return 0;
            if (!put_value(key, args[i])) return 0;
            views[i].data = (char *)&views[i];  /* an address that no tensor has */
            continue;
        }
        if (args[i] && !describe(args[i], &views[i])) return 0;
        if (*device >= 0 && *device != views[i].device.index) return 0;
        *device = views[i].device.index;
        if (!put_tensor(key, args[i], views, i, self->by_identity >> i & 1)) return 0;
        if (self->with_rows >> i & 1) note_rows(call, &views[i]);
    }
    return is_current(*device);
}

/* Write a number where the key has the number of rows. */
static void put_rows(CallKey *call, int64_t number) {
    for (int i = 0; i < call->num_places; i++)
        memcpy(call->key.bytes + call->places[i], &number, sizeof number);
}

/* Let the key be that of the class of the call, and return the index of the class's limit, or 0 if
   there is no class. Triton compiles other kernels for multiples of 16, so these are a class of
   their own. No size is negative. */
static int put_class(const Replay *self, CallKey *call) {
    int number = 0;
    if (call->num_places <= 0) return 0;
    while (number < self->num_limits && call->rows > self->limits[number]) number++;
    if (number == 0 || number == self->num_limits) return 0;
    put_rows(call, -2 * number - (call->rows % 16 == 0));
    return number;
}

/* Return the program with this key, or NULL, and the key as an object. */
static Program *look_up_program(const Replay *self, const Key *key, PyObject **bytes) {
    *bytes = key_object(self, key);
    return *bytes ? (Program *)look_up(self->programs, *bytes) : NULL;
}

/* Return the program of a call and describe its tensors; or return NULL, with the answer of the
   call: the key under which to store a program where there is none, NotImplemented where the call
   cannot be replayed, or NULL after an error. */
static Program *find_program(Replay *self, PyObject *const *args, Py_ssize_t nargs,
                             Operands *operands, PyObject **answer) {
    CallKey call;
    *answer = NULL;
    if (!put_call(self, &call, args, nargs, operands)) {
        *answer = Py_NewRef(Py_NotImplemented);
        return NULL;
    }
    PyObject *bytes;
    Program *program = NULL;
    if (!is_last_key(self, &call.key) && put_class(self, &call)) {
        program = look_up_program(self, &call.key, &bytes);
        if (!program && PyErr_Occurred()) { Py_XDECREF(bytes); return NULL; }
        if (program) operands->rows = call.rows;
        else { Py_DECREF(bytes); put_rows(&call, call.rows); }
    }
    if (!program) program = look_up_program(self, &call.key, &bytes);
    if (!program && !PyErr_Occurred()) {
        *answer = bytes;
        return NULL;
    }
#ifndef Py_GIL_DISABLED
    if (program && bytes != self->last_key) Py_XSETREF(self->last_key, Py_NewRef(bytes));
#endif
    Py_XDECREF(bytes);
    return program;
}

/* replay(*args)

   Return the results of the recorded program for such arguments; where there is none, the key
   under which to store one; or NotImplemented where the call cannot be replayed. */
static PyObject *replay_call(PyObject *object, PyObject *const *args, size_t nargsf,
                             PyObject *names) {
    Operands call;
    PyObject *answer;
    if (names || is_set(name_check, "0") || !may_replay()) Py_RETURN_NOTIMPLEMENTED;
    Program *program =
        find_program((Replay *)object, args, PyVectorcall_NARGS(nargsf), &call, &answer);
    if (!program) return answer;
    PyObject *results = run_program(program, &call, ALL_RESULTS, 0, NULL);
    Py_DECREF(program);
    return results;
}

static PyObject *replay_class_of(Replay *self, PyObject *const *args, Py_ssize_t nargs) {
    CallKey call;
    Operands operands;
    if (!put_call(self, &call, args, nargs, &operands)) Py_RETURN_NONE;
    int number = put_class(self, &call);
    if (number == 0) Py_RETURN_NONE;
    return Py_BuildValue("(y#LL)", call.key.bytes, call.key.used, (long long)call.rows,
                         (long long)self->limits[number]);
}

static PyMethodDef replay_methods[] = {
    {"class_of", (PyCFunction)(void (*)(void))replay_class_of, METH_FASTCALL,
     "class_of(*args): the key of the call's class, its number of rows and the class's greatest "
     "one; None where there is no class."},
    {NULL}};

static void replay_dealloc(Replay *self) {
    Py_XDECREF(self->programs);
    Py_XDECREF(self->last_key);
    PyObject_Free(self);
}

static PyObject *replay_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *programs, *limits = NULL;
    unsigned long long by_identity, with_rows = 0;
    if (!PyArg_ParseTuple(args, "O!K|KO!", &PyDict_Type, &programs, &by_identity, &with_rows,
                          &PyTuple_Type, &limits))
        return NULL;
    Py_ssize_t num_limits = limits ? PyTuple_GET_SIZE(limits) : 0;
    if (num_limits > MAX_LIMITS)
        return PyErr_Format(PyExc_ValueError, "expected at most %d limits", MAX_LIMITS);
    Replay *self = PyObject_New(Replay, type);
    if (!self) return NULL;
    self->with_rows = with_rows, self->num_limits = (int)num_limits;
    for (Py_ssize_t i = 0; i < num_limits; i++)
        self->limits[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(limits, i));
    self->call = replay_call;
    self->programs = Py_NewRef(programs);
    self->last_key = NULL;
    self->by_identity = by_identity;
    if (PyErr_Occurred()) Py_CLEAR(self);
    return (PyObject *)self;
}

static PyTypeObject replay_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "partita.runtime.Replay",
    .tp_basicsize = sizeof(Replay),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Replay, call),
    .tp_call = PyVectorcall_Call,
    .tp_methods = replay_methods,
    .tp_doc = "Replay(programs, by_identity, with_rows=0, limits=()): calls of an op, served by "
              "recorded programs.",
    .tp_new = replay_new,
    .tp_dealloc = (destructor)replay_dealloc,
};
