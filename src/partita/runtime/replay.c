/* The calls of an op, which recorded programs replay. `launcher.c` includes this file. */

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *programs;
    unsigned long long by_identity;
} Replay;

/* Return whether a variable of the environment has another value than "" and `other_than`. */
static int is_set(const char *name, const char *other_than) {
    const char *text = getenv(name);
    return text && *text && strcmp(text, other_than) != 0;
}

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

/* Describe the tensors of a call and make its key; return 0 where the call cannot be replayed. */
static int put_call(const Replay *self, Key *key, PyObject *const *args, Py_ssize_t nargs,
                    Arguments *found) {
    View *views = found->views;
    int *device = &found->device;
    key->used = 0, *device = -1;
    if (nargs > MAX_ARGS || nargs == 0 || !is_tensor(args[0])) return 0;
    for (Py_ssize_t i = 0; i < nargs; i++) {
        if (!is_tensor(args[i])) {
            if (!is_constant(args[i]) && !PyList_CheckExact(args[i])) return 0;
            if (!put_value(key, args[i])) return 0;
            views[i].data = (char *)&views[i];  /* an address that no tensor has */
            continue;
        }
        if (!describe(args[i], &views[i])) return 0;
        if (*device >= 0 && *device != views[i].device.index) return 0;
        *device = views[i].device.index;
        if (!put_tensor(key, args[i], views, i, self->by_identity >> i & 1)) return 0;
    }
    return is_current(*device);
}

/* replay(*args)

   Return the results of the recorded program for such arguments; where there is none, the key
   under which to store one; or NotImplemented where the call cannot be replayed: a variable turned
   replay off or checks on, a profiler has hooks, or the key would not say all. */
static PyObject *replay_call(PyObject *object, PyObject *const *args, size_t nargsf,
                             PyObject *names) {
    Replay *self = (Replay *)object;
    Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
    Arguments call;
    Key key;
    if (names || is_set("PARTITA_CHECK", "0") || is_set("PARTITA_REPLAY", "1") || has_hooks() ||
        !put_call(self, &key, args, nargs, &call))
        Py_RETURN_NOTIMPLEMENTED;
    PyObject *bytes = PyBytes_FromStringAndSize(key.bytes, key.used), *results = NULL;
    Program *program = bytes ? look_up(&program_type, self->programs, bytes) : NULL;
    if (!program && !PyErr_Occurred()) return bytes;
    if (program && program->args != nargs)
        PyErr_Format(PyExc_TypeError, "expected %d arguments, got %zd", program->args, nargs);
    else if (program)
        results = run_program(program, &call);
    Py_XDECREF(bytes);
    Py_XDECREF(program);
    return results;
}

static void replay_dealloc(Replay *self) {
    Py_XDECREF(self->programs);
    PyObject_Free(self);
}

static PyObject *replay_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *programs;
    unsigned long long by_identity;
    if (!PyArg_ParseTuple(args, "O!K", &PyDict_Type, &programs, &by_identity)) return NULL;
    Replay *self = PyObject_New(Replay, type);
    if (!self) return NULL;
    self->call = replay_call;
    self->programs = Py_NewRef(programs);
    self->by_identity = by_identity;
    return (PyObject *)self;
}

static PyTypeObject replay_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "partita.runtime.Replay",
    .tp_basicsize = sizeof(Replay),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(Replay, call),
    .tp_call = PyVectorcall_Call,
    .tp_doc = "Replay(programs, by_identity): calls of an op, served by recorded programs.",
    .tp_new = replay_new,
    .tp_dealloc = (destructor)replay_dealloc,
};
