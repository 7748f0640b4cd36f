/* Autograd functions of plain eager mode, whose passes are one call each; see `eager.py`.
   `launcher.c` includes this file. */

static PyObject *name_needs_input_grad, *name_saved_tensors, *name_to_save, *name_link, *name_result;
static PyObject *name_materialize_grads, *name_non_differentiable;

typedef struct { int count, at[MAX_ARGS]; } Positions;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    Replay *forward, *gradient;  /* of the op, and of the op of its gradient or NULL */
    PyObject *apply;             /* of the autograd function; NULL where there is none */
    PyObject *link, *run_forward, *run_backward;  /* functions of Python */
    /* Arguments of the op by position, results by ~ position in `saved`. */
    Positions inputs, values, saved, non_differentiable;
    int num_grads, num_tensors;  /* the arguments of the gradient that the context has not stored */
    int save_flag, attribute, materializes;
    uint64_t needed, returned;   /* bits of the results that are needed with and without a gradient */
} EagerCall;

/* A call that is under way, which the autograd function takes as its last argument. */
typedef struct {
    PyObject_HEAD
    PyObject *const *args;  /* NULL after the call */
    Py_ssize_t nargs;
    Program *program;
    const View *views;
    int device;
} Running;

static PyTypeObject running_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "partita.runtime.Running",
    .tp_basicsize = sizeof(Running),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "A call that is under way.",
    .tp_dealloc = (destructor)PyObject_Free,
};

static int requires_grad(PyObject *tensor) {
    PyObject *value = PyObject_GetAttr(tensor, name_requires_grad);
    if (!value) PyErr_Clear();
    Py_XDECREF(value);
    return value == Py_True;
}

/* Return one of an op's results, a borrowed reference, or NULL with an exception. */
static PyObject *result_at(PyObject *results, Py_ssize_t position) {
    if (PyTuple_Check(results)) return PyTuple_GetItem(results, position);
    if (position == 0) return results;
    PyErr_SetString(PyExc_IndexError, "the op has one result");
    return NULL;
}

/* Return the results that the function returns: one of them, or a tuple. Without an autograd function
   these are all results as they are. */
static PyObject *values_of(const EagerCall *self, PyObject *results) {
    if (self->values.count == 0) return Py_NewRef(results);
    if (self->values.count == 1) return Py_XNewRef(result_at(results, self->values.at[0]));
    PyObject *values = PyTuple_New(self->values.count);
    for (int i = 0; values && i < self->values.count; i++) {
        PyObject *value = result_at(results, self->values.at[i]);
        if (!value) Py_CLEAR(values);
        else PyTuple_SET_ITEM(values, i, Py_NewRef(value));
    }
    return values;
}

/* Return what `eager.py` links with a program for the inputs that need a gradient. */
static PyObject *link_of(const EagerCall *self, const Running *call, PyObject *needs_grad) {
    uint64_t needed = 0;
    PyObject *link = NULL;
    Program *program = call->program;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(needs_grad) && i < 64; i++)
        if (PyTuple_GET_ITEM(needs_grad, i) == Py_True) needed |= (uint64_t)1 << i;
    Py_BEGIN_CRITICAL_SECTION(program);
    if (program->link && program->needed == needed && program->linked_by == self)
        link = Py_NewRef(program->link);
    Py_END_CRITICAL_SECTION();
    if (link) return link;
    PyObject *args = PyTuple_New(call->nargs);
    if (!args) return NULL;
    for (Py_ssize_t i = 0; i < call->nargs; i++) PyTuple_SET_ITEM(args, i, Py_NewRef(call->args[i]));
    link = PyObject_CallFunctionObjArgs(self->link, args, needs_grad, NULL);
    Py_DECREF(args);
    if (!link) return NULL;
    Py_BEGIN_CRITICAL_SECTION(program);
    Py_XSETREF(program->link, Py_NewRef(link));
    program->needed = needed, program->linked_by = self;
    Py_END_CRITICAL_SECTION();
    return link;
}

/* Set an attribute of a context to an object, whose reference is taken. */
static int set(PyObject *ctx, PyObject *name, PyObject *value) {
    int failed = !value || PyObject_SetAttr(ctx, name, value);
    Py_XDECREF(value);
    return !failed;
}

/* Store in a context what the backward pass needs; return 0 after an error. */
static int set_up(const EagerCall *self, PyObject *ctx, const Running *call, PyObject *results,
                  PyObject *values) {
    PyObject *needs_grad = PyObject_GetAttr(ctx, name_needs_input_grad);
    if (!needs_grad) return 0;
    PyObject *link = PyTuple_Check(needs_grad) ? link_of(self, call, needs_grad) : NULL;
    Py_DECREF(needs_grad);
    PyObject *saved = set(ctx, name_link, link) ? PyTuple_New(self->saved.count) : NULL;
    for (int i = 0; saved && i < self->saved.count; i++) {
        int at = self->saved.at[i];
        PyObject *tensor = at < 0 ? result_at(results, ~at) : call->args[at];
        if (!tensor) Py_CLEAR(saved);
        else PyTuple_SET_ITEM(saved, i, Py_NewRef(tensor));
    }
    if (!set(ctx, name_to_save, saved)) return 0;
    if (!self->materializes && PyObject_SetAttr(ctx, name_materialize_grads, Py_False)) return 0;
    if (self->attribute >= 0 &&
        !set(ctx, name_result, Py_XNewRef(result_at(results, self->attribute))))
        return 0;
    if (self->non_differentiable.count == 0) return 1;
    PyObject *constants = PyTuple_New(self->non_differentiable.count);
    for (int i = 0; constants && i < self->non_differentiable.count; i++) {
        PyObject *value = PyTuple_GetItem(values, self->non_differentiable.at[i]);
        if (!value) Py_CLEAR(constants);
        else PyTuple_SET_ITEM(constants, i, Py_NewRef(value));
    }
    return set(ctx, name_non_differentiable, constants);
}

/* forward(ctx, *inputs, call), the forward pass of the autograd function. */
static PyObject *eager_forward(EagerCall *self, PyObject *const *args, Py_ssize_t nargs) {
    Running *call = nargs > 1 ? (Running *)args[nargs - 1] : NULL;
    if (!call || Py_TYPE(call) != &running_type)
        return PyObject_Vectorcall(self->run_forward, args, nargs, NULL);
    if (!call->args) return PyErr_Format(PyExc_RuntimeError, "the call has ended");
    PyObject *results = run_program(call->program, call->views, call->device, self->needed);
    PyObject *values = results ? values_of(self, results) : NULL;
    if (values && !set_up(self, args[0], call, results, values)) Py_CLEAR(values);
    Py_XDECREF(results);
    return values;
}

/* Call the autograd function, whose forward pass runs the program. */
static PyObject *apply_function(const EagerCall *self, PyObject *const *args, Py_ssize_t nargs,
                                Program *program, const View *views, int device) {
    PyObject *inputs[MAX_ARGS + 1];
    Py_ssize_t count = 0;
    Running *call = PyObject_New(Running, &running_type);
    if (!call) return NULL;
    call->args = args, call->nargs = nargs;
    call->program = program, call->views = views, call->device = device;
    for (int i = 0; i < self->inputs.count; i++)
        if (is_tensor(args[self->inputs.at[i]])) inputs[count++] = args[self->inputs.at[i]];
    inputs[count++] = (PyObject *)call;
    PyObject *values = PyObject_Vectorcall(self->apply, inputs, count, NULL);
    call->args = NULL;
    Py_DECREF(call);
    return values;
}

/* call(*args)

   Return the values of the function for such arguments; NotImplemented in plain eager mode where no
   program is recorded; or None where the mode is another one, and where values are checked. */
static PyObject *eager_call(PyObject *object, PyObject *const *args, size_t nargsf,
                            PyObject *names) {
    EagerCall *self = (EagerCall *)object;
    Py_ssize_t nargs = PyVectorcall_NARGS(nargsf);
    PyObject *given[MAX_ARGS], *answer, *values;
    View views[MAX_ARGS];
    int device, needs_gradient = 0;
    if (names || nargs > MAX_ARGS) Py_RETURN_NONE;
    if (!is_plain() || is_set(name_check, "0") || !is_default_backend()) Py_RETURN_NONE;
    if (self->apply && returns(is_grad_enabled, Py_True))
        for (int i = 0; i < self->inputs.count && !needs_gradient; i++) {
            int at = self->inputs.at[i];
            needs_gradient = at < nargs && is_tensor(args[at]) && requires_grad(args[at]);
        }
    if (self->apply && !needs_gradient && self->save_flag < 0) Py_RETURN_NONE;
    if (!may_replay()) Py_RETURN_NOTIMPLEMENTED;
    for (Py_ssize_t i = 0; i < nargs; i++) given[i] = args[i];
    if (self->save_flag >= 0) {
        if (self->save_flag >= nargs) Py_RETURN_NONE;
        given[self->save_flag] = needs_gradient ? Py_True : Py_False;
    }
    Program *program = find_program(self->forward, given, nargs, views, &device, &answer);
    if (!program) {
        if (!answer) return NULL;
        Py_DECREF(answer);
        Py_RETURN_NOTIMPLEMENTED;
    }
    if (needs_gradient)
        values = apply_function(self, given, nargs, program, views, device);
    else {
        PyObject *results = run_program(program, views, device, self->returned);
        values = results ? values_of(self, results) : NULL;
        Py_XDECREF(results);
    }
    Py_DECREF(program);
    return values;
}

/* Return the gradients of the inputs by a program, a key or NotImplemented where there is none, or
   NULL after an error. `positions` has for each input the number of the result or None. */
static PyObject *replay_gradients(EagerCall *self, PyObject *const *grads, PyObject *saved,
                                  PyObject *options, PyObject *positions) {
    PyObject *args[MAX_ARGS], *answer;
    View views[MAX_ARGS];
    uint64_t wanted = 0;
    int device;
    Py_ssize_t count = self->num_grads + self->num_tensors + PyTuple_GET_SIZE(options);
    if (PyTuple_GET_SIZE(saved) < self->num_tensors || count > MAX_ARGS) Py_RETURN_NOTIMPLEMENTED;
    for (Py_ssize_t i = 0; i < count; i++) {
        Py_ssize_t tensor = i - self->num_grads, option = tensor - self->num_tensors;
        args[i] = tensor < 0   ? grads[i]
                  : option < 0 ? PyTuple_GET_ITEM(saved, tensor)
                               : PyTuple_GET_ITEM(options, option);
    }
    Program *program = find_program(self->gradient, args, count, views, &device, &answer);
    if (!program) return answer;
    Py_ssize_t size = PyTuple_GET_SIZE(positions);
    for (Py_ssize_t i = 0; i < size; i++) {
        PyObject *position = PyTuple_GET_ITEM(positions, i);
        if (position != Py_None) wanted |= (uint64_t)1 << (PyLong_AsSize_t(position) & 63);
    }
    PyObject *results = run_program(program, views, device, wanted);
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

/* backward(ctx, *grads), the backward pass of the autograd function. Python computes gradients that
   will be differentiated, that no program computes, and those under transforms and modes. */
static PyObject *eager_backward(EagerCall *self, PyObject *const *args, Py_ssize_t nargs) {
    PyObject *saved = NULL, *found = NULL;
    if (nargs > self->num_grads && is_tensor(args[1]) && returns(is_grad_enabled, Py_False) &&
        is_plain() && !is_set(name_check, "0") && may_replay()) {
        PyObject *link = PyObject_GetAttr(args[0], name_link);
        if (!link) return NULL;
        saved = PyObject_GetAttr(args[0], name_saved_tensors);
        if (saved && PyTuple_Check(saved) && PyTuple_Check(link) && PyTuple_GET_SIZE(link) > 1)
            found = replay_gradients(self, args + 1, saved, PyTuple_GET_ITEM(link, 0),
                                     PyTuple_GET_ITEM(link, 1));
        Py_DECREF(link);
        if (!found || PyTuple_Check(found)) {
            Py_XDECREF(saved);
            return found;
        }
        Py_DECREF(found);
    }
    PyObject *grads = PyTuple_New(nargs - 1);
    for (Py_ssize_t i = 1; grads && i < nargs; i++)
        PyTuple_SET_ITEM(grads, i - 1, Py_NewRef(args[i]));
    if (grads)
        found = PyObject_CallFunctionObjArgs(self->run_backward, args[0], grads,
                                             saved ? saved : Py_None, NULL);
    else found = NULL;
    Py_XDECREF(grads);
    Py_XDECREF(saved);
    return found;
}

static PyMethodDef eager_methods[] = {
    {"forward", (PyCFunction)(void (*)(void))eager_forward, METH_FASTCALL,
     "forward(ctx, *inputs, call): the forward pass of the autograd function."},
    {"backward", (PyCFunction)(void (*)(void))eager_backward, METH_FASTCALL,
     "backward(ctx, *grads): the backward pass of the autograd function."},
    {NULL}};

/* Return `backward` as a method of contexts. */
static PyObject *eager_get_method(PyObject *self, void *unused) {
    PyObject *function = PyObject_GetAttrString(self, "backward");
    PyObject *method = function ? PyInstanceMethod_New(function) : NULL;
    Py_XDECREF(function);
    return method;
}

static PyGetSetDef eager_attributes[] = {
    {"method", eager_get_method, NULL, "`backward` as a method of contexts", NULL}, {NULL}};

static void eager_dealloc(EagerCall *self) {
    Py_XDECREF(self->forward);
    Py_XDECREF(self->gradient);
    Py_XDECREF(self->apply);
    Py_XDECREF(self->link);
    Py_XDECREF(self->run_forward);
    Py_XDECREF(self->run_backward);
    PyObject_Free(self);
}

static int read_positions(PyObject *numbers, Positions *positions) {
    positions->count = (int)PyTuple_GET_SIZE(numbers);
    if (positions->count > MAX_ARGS) {
        PyErr_Format(PyExc_ValueError, "expected at most %d positions", MAX_ARGS);
        return 0;
    }
    for (int i = 0; i < positions->count; i++)
        positions->at[i] = (int)PyLong_AsLong(PyTuple_GET_ITEM(numbers, i));
    return !PyErr_Occurred();
}

static uint64_t bits_of_values(const EagerCall *self) {
    uint64_t bits = self->values.count ? 0 : ALL_RESULTS;
    for (int i = 0; i < self->values.count; i++) bits |= (uint64_t)1 << self->values.at[i];
    return bits;
}

static PyObject *eager_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *forward, *gradient, *apply, *functions, *inputs, *values, *saved, *constants;
    EagerCall *self = PyObject_New(EagerCall, type);
    if (!self) return NULL;
    self->forward = self->gradient = NULL, self->apply = NULL;
    self->link = self->run_forward = self->run_backward = NULL, self->call = eager_call;
    if (!PyArg_ParseTuple(args, "O!OOO!O!O!O!O!iiiip", &replay_type, &forward, &gradient, &apply,
                          &PyTuple_Type, &functions, &PyTuple_Type, &inputs, &PyTuple_Type,
                          &values, &PyTuple_Type, &saved, &PyTuple_Type, &constants,
                          &self->num_grads, &self->num_tensors, &self->save_flag,
                          &self->attribute, &self->materializes) ||
        !read_positions(inputs, &self->inputs) || !read_positions(values, &self->values) ||
        !read_positions(saved, &self->saved) ||
        !read_positions(constants, &self->non_differentiable) ||
        !PyArg_ParseTuple(functions, "OOO", &self->link, &self->run_forward, &self->run_backward)) {
        self->link = self->run_forward = self->run_backward = NULL;
        Py_DECREF(self);
        return NULL;
    }
    Py_INCREF(self->link), Py_INCREF(self->run_forward), Py_INCREF(self->run_backward);
    self->forward = (Replay *)Py_NewRef(forward);
    if (gradient != Py_None) self->gradient = (Replay *)Py_NewRef(gradient);
    if (apply != Py_None) self->apply = Py_NewRef(apply);
    self->returned = self->needed = bits_of_values(self);
    for (int i = 0; i < self->saved.count; i++)
        if (self->saved.at[i] < 0) self->needed |= (uint64_t)1 << ~self->saved.at[i];
    if (self->attribute >= 0) self->needed |= (uint64_t)1 << self->attribute;
    return (PyObject *)self;
}

static PyTypeObject eager_call_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "partita.runtime.EagerCall",
    .tp_basicsize = sizeof(EagerCall),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_vectorcall_offset = offsetof(EagerCall, call),
    .tp_call = PyVectorcall_Call,
    .tp_methods = eager_methods,
    .tp_getset = eager_attributes,
    .tp_doc = "EagerCall(...): calls of an op in plain eager mode; see eager.py.",
    .tp_new = eager_new,
    .tp_dealloc = (destructor)eager_dealloc,
};
