/* The decisions of functions, by what their checks look at; see `known_calls.py`. `launcher.c`
   includes this file. */

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *decisions;
    int by_size;
} KnownCalls;

typedef struct { int count; int64_t seen[MAX_ARGS]; } Sizes;

/* Add sizes by the first one of the call that is equal, so that a key has which ones are equal. It
   also has which ones are 0, because checks look at that. */
static int put_equal_sizes(Key *key, const View *view, Sizes *sizes) {
    for (int i = 0; i < view->ndim; i++) {
        int first = view->shape[i] == 0 ? -1 : 0;
        if (sizes->count == MAX_ARGS) return 0;
        sizes->seen[sizes->count++] = view->shape[i];
        while (first >= 0 && sizes->seen[first] != view->shape[i]) first++;
        if (!put(key, &first, sizeof first)) return 0;
    }
    return 1;
}

/* Add a tensor's dtype, device, shape and whether it needs a gradient. Half types are left to
   Python, because autocast decides about them. Without `sizes`, those of the shape count. */
static int put_checked(Key *key, PyObject *arg, Sizes *sizes) {
    View view;
    if (!describe_memory(arg, &view)) return 0;
    if ((view.dtype.code == 2 || view.dtype.code == 4) && view.dtype.bits < 32) return 0;
    PyObject *value = PyObject_GetAttr(arg, name_requires_grad);
    if (!value) { PyErr_Clear(); return 0; }
    int requires_grad = value == Py_True;
    Py_DECREF(value);
    int32_t properties[5] = {view.dtype.code, view.dtype.bits, view.ndim, view.device.index,
                             requires_grad};
    if (!put_tagged(key, 't', properties, sizeof properties)) return 0;
    return sizes ? put_equal_sizes(key, &view, sizes)
                 : put(key, view.shape, view.ndim * (Py_ssize_t)sizeof(int64_t));
}

/* known(*args)

   Return the decision for such arguments; the key under which to store one, where there is none; or
   None for other arguments, about which Python has to decide. */
static PyObject *known_call(PyObject *object, PyObject *const *args, size_t nargsf,
                            PyObject *names) {
    KnownCalls *self = (KnownCalls *)object;
    Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
    Key key;
    Sizes sizes, *of_call = self->by_size ? NULL : &sizes;
    key.used = 0, sizes.count = 0;
    if (names || nargs > MAX_ARGS) Py_RETURN_NONE;
    for (Py_ssize_t i = 0; i < nargs; i++) {
        int is_put = is_tensor(args[i]) ? put_checked(&key, args[i], of_call)
                                        : is_constant(args[i]) && put_value(&key, args[i]);
        if (!is_put) Py_RETURN_NONE;
    }
    PyObject *bytes = PyBytes_FromStringAndSize(key.bytes, key.used);
    if (!bytes) return NULL;
    PyObject *found = look_up(self->decisions, bytes);
    if (!found && !PyErr_Occurred()) return bytes;
    Py_DECREF(bytes);
    return found;
}

static void known_calls_dealloc(KnownCalls *self) {
    Py_XDECREF(self->decisions);
    PyObject_Free(self);
}

static PyObject *known_calls_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *decisions;
    int by_size;
    if (!PyArg_ParseTuple(args, "O!p", &PyDict_Type, &decisions, &by_size)) return NULL;
    KnownCalls *self = PyObject_New(KnownCalls, type);
    if (!self) return NULL;
    self->call = known_call;
    self->decisions = Py_NewRef(decisions);
    self->by_size = by_size;
    return (PyObject *)self;
}

static PyTypeObject known_calls_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "partita.runtime.KnownCalls",
    .tp_basicsize = sizeof(KnownCalls),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(KnownCalls, call),
    .tp_call = PyVectorcall_Call,
    .tp_doc = "KnownCalls(decisions, by_size): the decisions of a function by its arguments.",
    .tp_new = known_calls_new,
    .tp_dealloc = (destructor)known_calls_dealloc,
};
