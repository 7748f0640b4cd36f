/* The backward pass of autograd functions in plain eager mode; see `eager.py`. `eager.c` includes
   this file. */

#define MAX_NUMBERS 128  /* sizes and strides of the tensors in a block */

/* Describe a tensor that lies in a block, given its entry of `parts_of_block`; return 0 where the
   numbers have no room. */
static int describe_part(PyObject *part, const View *block, View *view, int64_t *numbers,
                         int *used) {
    PyObject *size = PyTuple_GET_ITEM(part, 1), *stride = PyTuple_GET_ITEM(part, 2);
    int ndim = (int)PyTuple_GET_SIZE(size), is_empty = 0;
    if (*used + 2 * ndim > MAX_NUMBERS) return 0;
    *view = *block;
    view->ndim = ndim;
    view->dtype.code = (uint8_t)PyLong_AsLong(PyTuple_GET_ITEM(part, 4));
    view->dtype.bits = (uint8_t)PyLong_AsLong(PyTuple_GET_ITEM(part, 5));
    view->shape = numbers + *used, view->strides = view->shape + ndim;
    *used += 2 * ndim;
    for (int i = 0; i < ndim; i++) {
        view->shape[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(size, i));
        view->strides[i] = PyLong_AsLongLong(PyTuple_GET_ITEM(stride, i));
        is_empty |= view->shape[i] == 0;
    }
    view->data = is_empty ? NULL : block->data + PyLong_AsSsize_t(PyTuple_GET_ITEM(part, 0));
    return 1;
}

/* Add the saved tensors to the arguments of the gradient, or describe those in the block, which is
   the last saved tensor where it has `parts`; return 0 where they do not fit. */
static int add_saved(const EagerCall *self, PyObject *saved, PyObject *parts, PyObject **args,
                     View *views, int64_t *numbers) {
    Py_ssize_t next = 0, count = PyTuple_GET_SIZE(saved);
    int used = 0;
    View block;
    if (parts == Py_None) {
        for (int i = 0; i < self->num_tensors && i < count; i++)
            args[i] = PyTuple_GET_ITEM(saved, i);
        return self->num_tensors <= count;
    }
    PyObject *last = count ? PyTuple_GET_ITEM(saved, count - 1) : NULL;
    if (!last || !is_tensor(last) || !describe_memory(last, &block)) return 0;
    if (PyTuple_GET_SIZE(parts) < self->num_tensors) return 0;
    for (int i = 0; i < self->num_tensors; i++) {
        PyObject *part = PyTuple_GET_ITEM(parts, i);
        args[i] = NULL;
        if (part != Py_None) {
            if (!describe_part(part, &block, &views[i], numbers, &used)) return 0;
        } else if (next < count)
            args[i] = PyTuple_GET_ITEM(saved, next++);
        else
            return 0;
    }
    return 1;
}

/* Return the gradients of the inputs by a program, a key or NotImplemented where there is none, or
   NULL after an error. The link has the options of the gradient, for each input the number of the
   result or None, and where saved tensors lie in a block. */
static PyObject *replay_gradients(EagerCall *self, PyObject *const *grads, PyObject *saved,
                                  PyObject *link) {
    PyObject *args[MAX_ARGS], *answer;
    PyObject *options = PyTuple_GET_ITEM(link, 0), *positions = PyTuple_GET_ITEM(link, 1);
    Operands operands;
    int64_t numbers[MAX_NUMBERS];
    uint64_t wanted = 0;
    int before = self->num_grads, first = before + self->num_tensors;
    Py_ssize_t count = first + PyTuple_GET_SIZE(options);
    if (count > MAX_ARGS) Py_RETURN_NOTIMPLEMENTED;
    for (int i = 0; i < before; i++) args[i] = grads[i];
    if (!add_saved(self, saved, PyTuple_GET_ITEM(link, 3), args + before, operands.views + before,
                   numbers))
        Py_RETURN_NOTIMPLEMENTED;
    for (Py_ssize_t i = first; i < count; i++) args[i] = PyTuple_GET_ITEM(options, i - first);
    Program *program = find_program(self->gradient, args, count, &operands, &answer);
    if (!program) return answer;
    Py_ssize_t size = PyTuple_GET_SIZE(positions);
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *position = PyTuple_GET_ITEM(positions, i);
        if (position != Py_None) wanted |= (uint64_t)1 << (PyLong_AsSize_t(position) & 63);
    }
    PyObject *results = run_program(program, &operands, wanted, 0, NULL);
    PyObject *gradients = results ? PyTuple_New(size) : NULL;
    for (Py_ssize_t i = 0; gradients && i < size; i++) {
        PyObject *position = PyTuple_GET_ITEM(positions, i), *gradient = Py_None;
        if (position != Py_None) gradient = result_at(results, PyLong_AsSsize_t(position));
        if (!gradient) Py_CLEAR(gradients);
        else PyTuple_SET_ITEM(gradients, i, Py_NewRef(gradient));
    }
    Py_XDECREF(results);
    Py_DECREF(program);
    return gradients;
}

/* Multiply the result that the context stores by the gradient of the value, and return the
   gradients of the inputs, of which it is the first; or a key, NotImplemented or NULL as above. */
static PyObject *replay_scaling(EagerCall *self, PyObject *ctx, PyObject *grad, PyObject *link) {
    PyObject *options = PyTuple_GET_ITEM(link, 0), *positions = PyTuple_GET_ITEM(link, 1);
    Py_ssize_t last = PyTuple_GET_SIZE(options) - 1, size = PyTuple_GET_SIZE(positions);
    PyObject *result = PyObject_GetAttr(ctx, name_result), *gradients = NULL, *answer;
    Operands operands;
    if (!result) return NULL;
    PyObject *args[] = {result, grad, last < 0 ? Py_None : PyTuple_GET_ITEM(options, last)};
    Program *program = find_program(self->gradient, args, 3, &operands, &answer);
    if (program && !PyObject_SetAttr(ctx, name_result, Py_None)) {
        PyObject *none = run_program(program, &operands, ALL_RESULTS, 0, NULL);
        gradients = none ? PyTuple_New(size) : NULL;
        for (Py_ssize_t i = 0; gradients && i < size; i++)
            PyTuple_SET_ITEM(gradients, i, Py_NewRef(i == 0 ? result : Py_None));
        Py_XDECREF(none);
    }
    Py_DECREF(result);
    if (!program) return answer;
    Py_DECREF(program);
    return gradients;
}

/* backward(ctx, *grads), the backward pass of the autograd function. Python computes gradients that
   will be differentiated, that no program computes, and those under transforms and modes. It gets
   the saved tensors if they were asked for, and the key of a scaling that no program computes. */
static PyObject *eager_backward(EagerCall *self, PyObject *const *args, Py_ssize_t nargs) {
    PyObject *saved = NULL, *found = NULL;
    if (self->gradient && nargs > self->num_grads && is_tensor(args[1]) &&
        returns(is_grad_enabled, Py_False) && is_plain() && !is_set(name_check, "0") &&
        may_replay()) {
        PyObject *link = PyObject_GetAttr(args[0], name_link);
        if (!link) return NULL;
        if (!self->scales) saved = PyObject_GetAttr(args[0], name_saved_tensors);
        if (!PyTuple_Check(link) || PyTuple_GET_SIZE(link) != 4)
            PyErr_SetString(PyExc_TypeError, "expected a link of four fields");
        else if (self->scales)
            found = replay_scaling(self, args[0], args[1], link);
        else if (saved && PyTuple_Check(saved))
            found = replay_gradients(self, args + 1, saved, link);
        Py_DECREF(link);
        if (!found || PyTuple_Check(found)) {
            Py_XDECREF(saved);
            return found;
        }
        if (self->scales && PyBytes_Check(found)) saved = Py_NewRef(found);
        Py_DECREF(found);
    }
    PyObject *grads = PyTuple_New(nargs - 1);
    for (Py_ssize_t i = 1; grads && i < nargs; i++)
        PyTuple_SET_ITEM(grads, i - 1, Py_NewRef(args[i]));
    found = grads ? PyObject_CallFunctionObjArgs(self->run_backward, args[0], grads,
                                                 saved ? saved : Py_None, NULL)
                  : NULL;
    Py_XDECREF(grads);
    Py_XDECREF(saved);
    return found;
}
