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

/* Return whether a variable of the environment has another value than "" and `other_than`. */
static int is_set(const char *name, const char *other_than) {
    const char *text = getenv(name);
    return text && *text && strcmp(text, other_than) != 0;
}
