/* Calls that a function of PyTorch serves; see `native.py`. `launcher.c` includes this file. */

/* Return whether a tensor has up to this number of elements, in order and without gaps. */
static int is_dense(const View *view, long limit) {
    int64_t elements = 1;
    for (int i = view->ndim - 1; i >= 0 && elements <= limit; i--) {
        if (view->shape[i] > limit) return 0;  /* An empty tensor may have any other sizes. */
        if (view->shape[i] != 1 && view->strides[i] != elements) return 0;
        elements *= view->shape[i];
    }
    return elements <= limit;
}

/* serve(function, limit, input, dim)

   Return `function(input, dim, False)` in plain eager mode and without a chosen backend, where the
   input is a dense tensor in fp32 or fp64 of at most `limit` elements. Return None for any others,
   and where the function raises: the checks in Python then say what is wrong. */
static PyObject *serve(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    View view;
    if (nargs != 4) return PyErr_Format(PyExc_TypeError, "expected 4 arguments, got %zd", nargs);
    long limit = PyLong_AsLong(args[1]);
    if (limit == -1 && PyErr_Occurred()) return NULL;
    if (!is_tensor(args[2]) || !PyLong_CheckExact(args[3]) || !is_plain() ||
        !is_default_backend() || !describe_memory(args[2], &view) || view.dtype.code != 2 ||
        view.dtype.bits < 32 || !is_dense(&view, limit))
        Py_RETURN_NONE;
    PyObject *given[] = {args[2], args[3], Py_False};
    PyObject *result = PyObject_Vectorcall(args[0], given, 3, NULL);
    if (result || !PyErr_ExceptionMatches(PyExc_Exception)) return result;
    PyErr_Clear();
    Py_RETURN_NONE;
}
