/* What decides whether the C module may serve a call. `launcher.c` includes this file. */

/* Return a new reference to the value of a key, or NULL, with an exception after an error only. */
static PyObject *look_up(PyObject *dict, PyObject *key) {
    return Py_XNewRef(PyDict_GetItemWithError(dict, key));
}

/* Look up a value that has to be of a type of this module. */
static void *look_up_as(PyTypeObject *type, PyObject *dict, PyObject *key) {
    PyObject *value = look_up(dict, key);
    if (value && !Py_IS_TYPE(value, type)) {
        PyErr_Format(PyExc_TypeError, "expected a %s, got %R", type->tp_name, value);
        Py_CLEAR(value);
    }
    return value;
}

/* Return whether profilers have asked to see launches, which only Triton's launcher reports. */
static int has_hook(PyObject *name, PyObject *empty_chain) {
    PyObject *chain = PyObject_GetAttr(knobs, name);
    if (!chain) { PyErr_Clear(); return 1; }
    int found = chain != empty_chain && chain != Py_None;
    if (chain == empty_chain && chain != Py_None) {
        PyObject *calls = PyObject_GetAttr(chain, name_calls);
        found = !calls || !PyList_Check(calls) || PyList_GET_SIZE(calls) > 0;
        if (!calls) PyErr_Clear();
        Py_XDECREF(calls);
    }
    Py_DECREF(chain);
    return found;
}

static int has_hooks(void) {
    return has_hook(name_enter_hook, enter_hook) || has_hook(name_exit_hook, exit_hook);
}

/* Return whether a variable has another value than "" and `other_than`.

   getenv reads the start of every variable up to this one, which costs more than all else in a key
   where the caches are cold, so the variable is looked up in the dictionary of os.environ. */
static int is_set(PyObject *name, const char *other_than) {
    if (!PyDict_Check(environment)) {
        const char *text = getenv(PyBytes_AS_STRING(name));
        return text && *text && strcmp(text, other_than) != 0;
    }
    PyObject *value = look_up(environment, name);
    if (!value) { PyErr_Clear(); return 0; }
    const char *text = PyBytes_Check(value) ? PyBytes_AS_STRING(value) : "not bytes";
    int is_other = *text && strcmp(text, other_than) != 0;
    Py_DECREF(value);
    return is_other;
}

/* Return whether nobody has turned replay off: no user by a variable, and no profiler by a hook. */
static int may_replay(void) {
    return !is_set(name_replay, "1") && !has_hooks();
}
