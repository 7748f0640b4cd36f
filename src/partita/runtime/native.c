/* Calls that a function of PyTorch serves; see `native.py`. `launcher.c` includes this file. */

/* Return the number of elements of a tensor in order and without gaps, or -1 for any other. */
static int64_t dense_elements(const View *view) {
    int64_t elements = 1;
    for (int i = view->ndim - 1; i >= 0; i--) {
        if (view->shape[i] != 1 && view->strides[i] != elements) return -1;
        elements *= view->shape[i];
    }
    return elements;
}

/* serve(function, limit, input, dim)

   Return `function(input, dim, False)` in plain eager mode and without a chosen backend, where the
   input is a dense tensor in fp32 or fp64 of at most `limit` elements. Return None for any others,
   and where the function raises: the checks in Python then say what is wrong. */
static PyObject *serve(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    View view;
    if (nargs != 4) return PyErr_Format(PyExc_TypeError, "expected 4 arguments, got %zd", nargs);
    if (!is_tensor(args[2]) || !PyLong_CheckExact(args[3]) || !is_plain() ||
        !is_default_backend() || !describe_memory(args[2], &view) || view.dtype.code != 2 ||
        view.dtype.bits < 32)
        Py_RETURN_NONE;
    int64_t elements = dense_elements(&view), limit = PyLong_AsLongLong(args[1]);
    if (limit == -1 && PyErr_Occurred()) return NULL;
    if (elements < 0 || elements > limit) Py_RETURN_NONE;
    PyObject *given[] = {args[2], args[3], Py_False};
    PyObject *result = PyObject_Vectorcall(args[0], given, 3, NULL);
    if (result || !PyErr_ExceptionMatches(PyExc_Exception)) return result;
    PyErr_Clear();
    Py_RETURN_NONE;
}
