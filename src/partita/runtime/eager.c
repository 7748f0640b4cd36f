/* Autograd functions of plain eager mode, whose passes are one call each; see `eager.py`.
   `launcher.c` includes this file. */

static PyObject *name_needs_input_grad, *name_saved_tensors, *name_to_save, *name_link;
static PyObject *name_result, *name_materialize_grads, *name_non_differentiable;

typedef struct { int count, at[MAX_ARGS]; } Positions;

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    Replay *forward, *gradient;  /* of the op, and of the op of its gradient or NULL */
    int scales;                  /* whether `gradient` multiplies the context's result in place */
    PyObject *apply;             /* of the autograd function; NULL where there is none */
    PyObject *link, *record, *run_forward, *run_backward;  /* functions of Python */
    /* Arguments of the op by position, results by ~ position in `saved`. */
    Positions inputs, values, saved, non_differentiable;
    int num_grads, num_tensors;  /* the arguments of the gradient that the context has not stored */
    int save_flag, attribute, materializes;
    uint64_t needed, returned;   /* bits of the results with and without a gradient to come */
} EagerCall;

/* A call that is under way. */
typedef struct {
    const EagerCall *function;
    PyObject *const *args;
    Py_ssize_t nargs;
    Program *program;  /* or NULL, and the key under which Python stores one */
    PyObject *key;
    const Operands *operands;
} Running;

/* The call of this thread whose forward pass PyTorch has yet to start. */
static _Thread_local const Running *running;

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

/* Return the results that the function returns: one of them, or a tuple. Without an autograd
   function these are all results as they are. */
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

/* Return the bits of the results that one tensor stores for the backward pass: those that are saved
   and not returned, if they are several, and no result shares their memory. The tensor's layout is
   that of one number of rows. */
static uint64_t stored_results(const EagerCall *self, const Program *program) {
    uint64_t stored = 0, used = 0, shared = 0;
    if (program->serves_any_rows || !PyList_Check(program->results)) return 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(program->results); i++) {
        PyObject *entry = PyList_GET_ITEM(program->results, i);
        Py_ssize_t output = output_of(entry);
        if (i >= 64 || output >= 64) return 0;
        if (used >> output & 1 || !PyLong_Check(entry)) shared |= (uint64_t)1 << output;
        used |= (uint64_t)1 << output;
    }
    for (int i = 0; i < self->saved.count; i++) {
        int at = self->saved.at[i], number = ~at;
        if (at >= 0 || self->returned >> number & 1 || number == self->attribute) continue;
        Py_ssize_t output = output_of(PyList_GET_ITEM(program->results, number));
        if (!(shared >> output & 1)) stored |= (uint64_t)1 << number;
    }
    return stored & (stored - 1) ? stored : 0;
}

/* Return for each saved tensor where it lies in the block: the offset, size, stride and dtype, and
   the code and the bits of the dtype; None for a tensor of its own. */
static PyObject *parts_of_block(const EagerCall *self, const Program *program, uint64_t stored) {
    Py_ssize_t offsets[MAX_SLOTS], offset = 0;
    char place[MAX_SLOTS];
    place_outputs(program, self->needed & ~stored, stored, place);
    for (Py_ssize_t i = 0; i < program->num_outputs; i++) {
        offsets[i] = offset;
        if (place[i] == STORED) offset += program->sizes[i];
    }
    PyObject *parts = PyTuple_New(self->saved.count), *none = Py_BuildValue("(i)", 0);
    for (int i = 0; parts && none && i < self->saved.count; i++) {
        int at = self->saved.at[i];
        PyTuple_SET_ITEM(parts, i, Py_NewRef(Py_None));
        if (at >= 0 || !(stored >> ~at & 1)) continue;
        Py_ssize_t output = output_of(PyList_GET_ITEM(program->results, ~at));
        PyObject *spec = PyTuple_GET_ITEM(program->outputs, output);
        PyObject *dtype = PyTuple_GET_ITEM(spec, 2), *found = NULL;
        PyObject *arguments[] = {none, program->unit_stride, dtype};
        PyObject *empty = PyObject_Vectorcall(allocate, arguments, 3, NULL);
        View view;
        if (empty && !exchange->describe(empty, &view))
            found = Py_BuildValue("(nOOOii)", offsets[output], PyTuple_GET_ITEM(spec, 0),
                                  PyTuple_GET_ITEM(spec, 1), dtype, view.dtype.code,
                                  view.dtype.bits);
        Py_XDECREF(empty);
        if (!found) Py_CLEAR(parts);
        else {
            Py_DECREF(Py_None);
            PyTuple_SET_ITEM(parts, i, found);
        }
    }
    Py_XDECREF(none);
    return parts;
}

/* Return what `eager.py` links with a program for the inputs that need a gradient, and the bits of
   the results that are stored in a block. Hooks of saved tensors see each tensor by itself. */
static PyObject *link_of(const EagerCall *self, const Running *call, PyObject *needs_grad,
                         uint64_t *stored) {
    int has_hooks = !PyCallable_Check(saved_hooks), bit = 0;
    PyObject *hooks = has_hooks ? NULL : PyObject_CallOneArg(saved_hooks, Py_False);
    if (!hooks) PyErr_Clear();
    has_hooks = hooks != Py_None;
    Py_XDECREF(hooks);
    uint64_t needed = has_hooks;
    PyObject *link = NULL;
    Program *program = call->program;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(needs_grad) && ++bit < 64; i++)
        if (PyTuple_GET_ITEM(needs_grad, i) == Py_True) needed |= (uint64_t)1 << bit;
    Py_BEGIN_CRITICAL_SECTION(program);
    if (program->link && program->needed == needed && program->linked_by == self) {
        link = Py_NewRef(program->link);
        *stored = program->stored;
    }
    Py_END_CRITICAL_SECTION();
    if (link) return link;
    *stored = has_hooks ? 0 : stored_results(self, program);
    PyObject *parts = *stored ? parts_of_block(self, program, *stored) : Py_NewRef(Py_None);
    PyObject *args = parts ? PyTuple_New(call->nargs) : NULL;
    for (Py_ssize_t i = 0; args && i < call->nargs; i++)
        PyTuple_SET_ITEM(args, i, Py_NewRef(call->args[i]));
    if (args) link = PyObject_CallFunctionObjArgs(self->link, args, needs_grad, parts, NULL);
    Py_XDECREF(args);
    Py_XDECREF(parts);
    if (!link) return NULL;
    Py_BEGIN_CRITICAL_SECTION(program);
    Py_XSETREF(program->link, Py_NewRef(link));
    program->needed = needed, program->linked_by = self, program->stored = *stored;
    Py_END_CRITICAL_SECTION();
    return link;
}

/* Let Python serve a call without a program and record it; return the results, and what `eager.py`
   links with the call. */
static PyObject *record_call(const EagerCall *self, const Running *call, PyObject *needs_grad,
                             PyObject **link) {
    PyObject *args = PyTuple_New(call->nargs), *results = NULL;
    for (Py_ssize_t i = 0; args && i < call->nargs; i++)
        PyTuple_SET_ITEM(args, i, Py_NewRef(call->args[i]));
    if (args) results = PyObject_CallFunctionObjArgs(self->record, call->key, args, NULL);
    *link = NULL;
    if (results)
        *link = PyObject_CallFunctionObjArgs(self->link, args, needs_grad, Py_None, NULL);
    Py_XDECREF(args);
    return results;
}

/* Set an attribute of a context to an object, whose reference is taken. */
static int set(PyObject *ctx, PyObject *name, PyObject *value) {
    int failed = !value || PyObject_SetAttr(ctx, name, value);
    Py_XDECREF(value);
    return !failed;
}

/* Return the tensors to save. The block of stored results is the last one. */
static PyObject *tensors_to_save(const EagerCall *self, const Running *call, PyObject *results,
                                 uint64_t stored, PyObject *block) {
    PyObject *tensors[MAX_ARGS + 1];
    Py_ssize_t count = 0;
    for (int i = 0; i < self->saved.count; i++) {
        int at = self->saved.at[i];
        if (at < 0 && stored >> ~at & 1) continue;
        tensors[count] = at < 0 ? result_at(results, ~at) : call->args[at];
        if (!tensors[count++]) return NULL;
    }
    if (stored) tensors[count++] = block;
    PyObject *saved = PyTuple_New(count);
    for (Py_ssize_t i = 0; saved && i < count; i++)
        PyTuple_SET_ITEM(saved, i, Py_NewRef(tensors[i]));
    return saved;
}

/* Store in a context what else the backward pass needs; return 0 after an error. */
static int set_up(const EagerCall *self, PyObject *ctx, PyObject *results, PyObject *values) {
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

/* forward(ctx, *inputs), the forward pass of the autograd function. Calls that Python serves have
   the arguments of the op as last input. */
static PyObject *eager_forward(EagerCall *self, PyObject *const *args, Py_ssize_t nargs) {
    const Running *call = running;
    if (nargs > 1 && PyTuple_CheckExact(args[nargs - 1]))
        return PyObject_Vectorcall(self->run_forward, args, nargs, NULL);
    if (nargs == 0 || !call || call->function != self)
        return PyErr_Format(PyExc_RuntimeError, "no call of this function is under way");
    running = NULL;
    PyObject *ctx = args[0], *results = NULL, *values = NULL, *block = NULL, *link;
    uint64_t stored = 0;
    PyObject *needs_grad = PyObject_GetAttr(ctx, name_needs_input_grad);
    if (needs_grad && !PyTuple_Check(needs_grad))
        PyErr_SetString(PyExc_TypeError, "needs_input_grad: expected a tuple");
    if (!needs_grad || PyErr_Occurred()) goto done;
    if (call->program) {
        if (!set(ctx, name_link, link_of(self, call, needs_grad, &stored))) goto done;
        results = run_program(call->program, call->operands, self->needed & ~stored, stored,
                              &block);
    } else {
        results = record_call(self, call, needs_grad, &link);
        if (results && !set(ctx, name_link, link)) goto done;
    }
    if (!results || !set(ctx, name_to_save, tensors_to_save(self, call, results, stored, block)))
        goto done;
    values = values_of(self, results);
    if (values && !set_up(self, ctx, results, values)) Py_CLEAR(values);
done:
    Py_XDECREF(needs_grad);
    Py_XDECREF(results);
    Py_XDECREF(block);
    return values;
}

/* Call the autograd function, whose forward pass runs the program or lets Python serve the call. */
static PyObject *apply_function(const EagerCall *self, const Running *call) {
    PyObject *inputs[MAX_ARGS];
    Py_ssize_t count = 0;
    const Running *outer = running;
    for (int i = 0; i < self->inputs.count; i++)
        if (is_tensor(call->args[self->inputs.at[i]]))
            inputs[count++] = call->args[self->inputs.at[i]];
    running = call;
    PyObject *values = PyObject_Vectorcall(self->apply, inputs, count, NULL);
    running = outer;
    return values;
}

/* Serve a call; see `eager_call`. With `may_record` Python serves and records a call whose gradient
   is wanted and that has no program. Its arguments were checked. */
static PyObject *serve_call(EagerCall *self, PyObject *const *args, Py_ssize_t nargs,
                            int may_record) {
    PyObject *given[MAX_ARGS], *answer, *values;
    Operands operands;
    int needs_gradient = 0;
    if (nargs > MAX_ARGS) Py_RETURN_NONE;
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
    Program *program = find_program(self->forward, given, nargs, &operands, &answer);
    if (!program && !answer) return NULL;
    if (!program && !(may_record && needs_gradient && PyBytes_Check(answer))) {
        Py_DECREF(answer);
        Py_RETURN_NOTIMPLEMENTED;
    }
    if (needs_gradient) {
        Running call = {self, given, nargs, program, answer, &operands};
        values = apply_function(self, &call);
    } else {
        PyObject *results = run_program(program, &operands, self->returned, 0, NULL);
        values = results ? values_of(self, results) : NULL;
        Py_XDECREF(results);
    }
    Py_XDECREF(answer);
    Py_XDECREF(program);
    return values;
}

/* call(*args)

   Return the values of the function for such arguments; NotImplemented in plain eager mode where no
   program is recorded; or None where the mode is another one, and where values are checked. */
static PyObject *eager_call(PyObject *self, PyObject *const *args, size_t nargsf,
                            PyObject *names) {
    if (names) Py_RETURN_NONE;
    return serve_call((EagerCall *)self, args, PyVectorcall_NARGS(nargsf), 0);
}

static PyObject *eager_serve(EagerCall *self, PyObject *const *args, Py_ssize_t nargs) {
    return serve_call(self, args, nargs, 1);
}

#include "gradients.c"

static PyMethodDef eager_methods[] = {
    {"serve", (PyCFunction)(void (*)(void))eager_serve, METH_FASTCALL,
     "serve(*args): a checked call, which Python records if its gradient is wanted."},
    {"forward", (PyCFunction)(void (*)(void))eager_forward, METH_FASTCALL,
     "forward(ctx, *inputs): the forward pass of the autograd function."},
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
    Py_XDECREF(self->record);
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
    self->link = self->record = self->run_forward = self->run_backward = NULL;
    self->call = eager_call;
    if (!PyArg_ParseTuple(args, "O!OOO!O!O!O!O!iiiipp", &replay_type, &forward, &gradient, &apply,
                          &PyTuple_Type, &functions, &PyTuple_Type, &inputs, &PyTuple_Type,
                          &values, &PyTuple_Type, &saved, &PyTuple_Type, &constants,
                          &self->num_grads, &self->num_tensors, &self->save_flag,
                          &self->attribute, &self->materializes, &self->scales) ||
        !read_positions(inputs, &self->inputs) || !read_positions(values, &self->values) ||
        !read_positions(saved, &self->saved) ||
        !read_positions(constants, &self->non_differentiable) ||
        !PyArg_ParseTuple(functions, "OOOO", &self->link, &self->record, &self->run_forward,
                          &self->run_backward)) {
        self->link = self->record = self->run_forward = self->run_backward = NULL;
        Py_DECREF(self);
        return NULL;
    }
    Py_INCREF(self->link), Py_INCREF(self->record);
    Py_INCREF(self->run_forward), Py_INCREF(self->run_backward);
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
