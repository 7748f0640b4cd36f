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

/* Return whether a function of no arguments returns this object or, with NULL, zero. */
static int returns(PyObject *function, PyObject *expected) {
    PyObject *result = PyObject_CallNoArgs(function);
    if (!result) { PyErr_Clear(); return 0; }
    int found = expected ? result == expected : PyLong_Check(result) && !PyObject_IsTrue(result);
    Py_DECREF(result);
    return found;
}

/* Return whether the user has chosen no backend, by a block, for the process or by a variable. */
static int is_default_backend(void) {
    PyObject *chosen;
    if (PyContextVar_Get(backend_of_block, Py_None, &chosen) < 0) { PyErr_Clear(); return 0; }
    int is_default = chosen == Py_None;
    Py_XDECREF(chosen);
    PyObject *of_process = look_up(backend_globals, name_default);
    if (!of_process) PyErr_Clear();
    is_default = is_default && of_process == Py_None && !is_set(name_backend, "");
    Py_XDECREF(of_process);
    return is_default;
}

/* Return whether no function transform, dispatch mode or level of forward mode is active. */
static int is_plain(void) {
    if (!returns(transform, Py_None) || !returns(num_modes, NULL)) return 0;
    PyObject *level = look_up(forward_globals, name_level);
    int is_off = level && PyLong_Check(level) && PyLong_AsLong(level) < 0;
    if (!level) PyErr_Clear();
    Py_XDECREF(level);
    return is_off;
}
