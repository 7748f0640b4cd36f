/* Programs, the recorded work of ops. `launcher.c` includes this file. */

enum { LAUNCH, FILL, FORK, LEAVE, JOIN };
static const uint64_t ALL_RESULTS = ~(uint64_t)0;

/* The numbers named `growth` are what a number grows by with each row of the call; 0 in programs
   for one number of rows. */
typedef struct { int slot; uint64_t value, growth; } Cell;  /* slot -1: the value itself */
typedef struct {
    int kind;
    void *function;
    unsigned programs, block, shared;
    int first, count;  /* the cells of the parameters; of a fill, the cell of its address */
    uint64_t words, programs_growth, words_growth;
} Step;

/* The arguments of a call. With `rows` its program serves several numbers of rows. */
typedef struct {
    View views[MAX_ARGS];
    int device;
    int64_t rows;
} Operands;

typedef struct {
    PyObject_HEAD
    int args, num_steps, uses_side_stream, serves_any_rows;
    Py_ssize_t num_outputs, workspace;
    Step *steps;
    Cell *cells;
    Py_ssize_t *sizes;  /* the bytes of each output, up to a multiple of WORKSPACE_ALIGNMENT */
    PyObject *outputs, *results, *workspace_size, *unit_stride, *keep;
    PyObject *link;  /* of the autograd function `linked_by` for the calls that `needed` tells */
    const void *linked_by;
    uint64_t needed, stored;
} Program;

static void program_dealloc(Program *self) {
    PyMem_Free(self->steps);
    PyMem_Free(self->cells);
    PyMem_Free(self->sizes);
    Py_XDECREF(self->outputs);
    Py_XDECREF(self->results);
    Py_XDECREF(self->workspace_size);
    Py_XDECREF(self->unit_stride);
    Py_XDECREF(self->keep);
    Py_XDECREF(self->link);
    PyObject_Free(self);
}

static int read_steps(Program *self, PyObject *steps) {
    int used = 0, limit = self->args + (int)self->num_outputs + (self->workspace > 0);
    for (int i = 0; i < self->num_steps; i++) {
        Step *step = &self->steps[i];
        unsigned long long function;
        PyObject *cells;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(steps, i), "iKIIIKO!", &step->kind, &function,
                              &step->programs, &step->block, &step->shared,
                              (unsigned long long *)&step->words, &PyTuple_Type, &cells))
            return 0;
        step->function = (void *)(uintptr_t)function;
        step->first = used, step->count = (int)PyTuple_GET_SIZE(cells);
        self->uses_side_stream |= step->kind == FORK;
        if (step->count + 2 > MAX_PARAMETERS) {
            PyErr_SetString(PyExc_ValueError, "a kernel has too many parameters");
            return 0;
        }
        for (int j = 0; j < step->count; j++, used++) {
            unsigned long long value;
            int slot;
            if (!PyArg_ParseTuple(PyTuple_GET_ITEM(cells, j), "iK", &slot, &value)) return 0;
            if (slot < -1 || slot >= limit) {
                PyErr_Format(PyExc_ValueError, "expected a slot below %d, got %d", limit, slot);
                return 0;
            }
            self->cells[used].slot = slot, self->cells[used].value = value;
        }
    }
    return 1;
}

/* Read what the numbers of each step grow by: programs, words of a fill, and each cell. */
static int read_growth(Program *self, PyObject *growth) {
    if (growth == Py_None) return 1;
    self->serves_any_rows = 1;
    for (int i = 0; i < self->num_steps; i++) {
        Step *step = &self->steps[i];
        PyObject *of_step = PySequence_GetItem(growth, i), *of_cells;
        unsigned long long programs, words;
        int is_read = of_step && PyArg_ParseTuple(of_step, "KKO!", &programs, &words,
                                                  &PyTuple_Type, &of_cells);
        if (is_read && PyTuple_GET_SIZE(of_cells) != step->count) {
            PyErr_SetString(PyExc_ValueError, "expected the growth of each cell");
            is_read = 0;
        }
        for (int j = 0; is_read && j < step->count; j++)
            self->cells[step->first + j].growth =
                PyLong_AsUnsignedLongLongMask(PyTuple_GET_ITEM(of_cells, j));
        if (is_read) step->programs_growth = programs, step->words_growth = words;
        Py_XDECREF(of_step);
        if (!is_read || PyErr_Occurred()) return 0;
    }
    return 1;
}

static int read_sizes(Program *self) {
    for (Py_ssize_t i = 0; i < self->num_outputs; i++) {
        PyObject *output = PyTuple_GET_ITEM(self->outputs, i);
        if (!PyTuple_Check(output) || PyTuple_GET_SIZE(output) != 4) {
            PyErr_SetString(PyExc_TypeError, "expected outputs of four fields");
            return 0;
        }
        Py_ssize_t size = PyLong_AsSsize_t(PyTuple_GET_ITEM(output, 3));
        if (PyErr_Occurred()) return 0;
        Py_ssize_t units = (size + WORKSPACE_ALIGNMENT - 1) / WORKSPACE_ALIGNMENT;
        self->sizes[i] = units * WORKSPACE_ALIGNMENT;
    }
    return 1;
}

static PyObject *program_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    int count;
    Py_ssize_t workspace;
    PyObject *outputs, *results, *steps, *keep, *growth = Py_None;
    if (!PyArg_ParseTuple(args, "iO!OnO!O|O", &count, &PyTuple_Type, &outputs, &results,
                          &workspace, &PyTuple_Type, &steps, &keep, &growth))
        return NULL;
    if (count + PyTuple_GET_SIZE(outputs) + 1 > MAX_SLOTS)
        return PyErr_Format(PyExc_ValueError, "expected at most %d slots", MAX_SLOTS);
    Py_ssize_t cells = 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps); i++) {
        PyObject *step = PyTuple_GET_ITEM(steps, i);
        if (!PyTuple_Check(step) || PyTuple_GET_SIZE(step) != 7)
            return PyErr_Format(PyExc_TypeError, "expected steps of seven fields");
        PyObject *of_step = PyTuple_GET_ITEM(step, 6);
        cells += PyTuple_Check(of_step) ? PyTuple_GET_SIZE(of_step) : 0;
    }
    Program *self = PyObject_New(Program, type);
    if (!self) return NULL;
    self->args = count, self->num_steps = (int)PyTuple_GET_SIZE(steps);
    self->uses_side_stream = self->serves_any_rows = 0;
    self->num_outputs = PyTuple_GET_SIZE(outputs), self->workspace = workspace;
    self->steps = PyMem_Calloc(self->num_steps + 1, sizeof(Step));
    self->cells = PyMem_Calloc(cells + 1, sizeof(Cell));
    self->sizes = PyMem_Calloc(self->num_outputs + 1, sizeof(Py_ssize_t));
    self->outputs = Py_NewRef(outputs), self->results = Py_NewRef(results);
    self->workspace_size = Py_BuildValue("(n)", workspace);
    self->unit_stride = Py_BuildValue("(i)", 1);
    self->keep = Py_NewRef(keep);
    self->link = NULL, self->linked_by = NULL, self->needed = self->stored = 0;
    if (!self->steps || !self->cells || !self->sizes || !read_sizes(self) ||
        !read_steps(self, steps) || !read_growth(self, growth)) {
        Py_DECREF(self);
        return PyErr_Occurred() ? NULL : PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static PyTypeObject program_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "partita.runtime.Program",
    .tp_basicsize = sizeof(Program),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Program(args, outputs, results, workspace, steps, keep, growth=None): an op's "
              "recorded work, for one number of rows or, with growth, for several.",
    .tp_new = program_new,
    .tp_dealloc = (destructor)program_dealloc,
};

/* Run all steps on the stream. The caller has released the GIL. Only what a step needs of the
   arrays is written, because the stack of the thread of backward passes is in no cache. */
static int run_steps(const Program *self, const uint64_t *slots, uint64_t rows, void *main,
                     void *side, void *event) {
    uint64_t cells[MAX_PARAMETERS];
    void *pointers[MAX_PARAMETERS], *stream = main;
    int num_pointers = 0;
    for (int i = 0; i < self->num_steps; i++) {
        const Step *step = &self->steps[i];
        for (; num_pointers < step->count + 2; num_pointers++)
            pointers[num_pointers] = &cells[num_pointers];
        for (int j = 0; j < step->count; j++) {
            Cell cell = self->cells[step->first + j];
            cells[j] = cell.value + cell.growth * rows + (cell.slot < 0 ? 0 : slots[cell.slot]);
        }
        unsigned programs = step->programs + (unsigned)(step->programs_growth * rows);
        /* Triton's kernels end with two pointers to scratch memory, which these do not use. */
        cells[step->count] = cells[step->count + 1] = 0;
        int status = 0;
        if (step->kind == LAUNCH)
            status = driver.launch(step->function, programs, 1, 1, step->block, 1, 1,
                                   step->shared, stream, pointers, NULL);
        else if (step->kind == FILL)
            status = driver.fill(cells[0], programs, step->words + step->words_growth * rows,
                                 stream);
        else if (step->kind == LEAVE)
            stream = main;
        else {
            void *before = step->kind == FORK ? main : side;
            stream = step->kind == FORK ? side : main;
            status = driver.record_event(event, before);
            if (!status) status = driver.wait_event(stream, event, 0);
        }
        if (status) return status;
    }
    return 0;
}

static PyObject *allocate_like(PyObject *size, PyObject *stride, PyObject *dtype, uint64_t *slot) {
    PyObject *arguments[] = {size, stride, dtype};
    PyObject *tensor = PyObject_Vectorcall(allocate, arguments, 3, NULL);
    View view;
    if (!tensor) return NULL;
    if (exchange->describe(tensor, &view)) { Py_DECREF(tensor); return NULL; }
    *slot = (uint64_t)(uintptr_t)(view.data + view.byte_offset);
    return tensor;
}

/* Return the size of an output, in which None stands for the number of rows. */
static PyObject *size_of(const Program *self, PyObject *size, int64_t rows) {
    if (!self->serves_any_rows) return Py_NewRef(size);
    PyObject *filled = PyTuple_New(PyTuple_GET_SIZE(size));
    for (Py_ssize_t i = 0; filled && i < PyTuple_GET_SIZE(size); i++) {
        PyObject *number = PyTuple_GET_ITEM(size, i);
        number = number == Py_None ? PyLong_FromLongLong(rows) : Py_NewRef(number);
        if (!number) Py_CLEAR(filled);
        else PyTuple_SET_ITEM(filled, i, number);
    }
    return filled;
}

/* Return the number of the output whose memory an entry of the results names. */
static Py_ssize_t output_of(PyObject *entry) {
    return PyLong_AsSsize_t(PyLong_Check(entry) ? entry : PyTuple_GET_ITEM(entry, 0));
}

/* Return the result that an entry names: an output, a view of one, or None without memory. */
static PyObject *result_of(PyObject *entry, PyObject **outputs) {
    PyObject *tensor = outputs[output_of(entry)];
    if (!tensor) Py_RETURN_NONE;
    if (PyLong_Check(entry)) return Py_NewRef(tensor);
    PyObject *arguments[] = {tensor, PyTuple_GET_ITEM(entry, 1), PyTuple_GET_ITEM(entry, 2),
                             PyTuple_GET_ITEM(entry, 3)};
    return PyObject_VectorcallMethod(name_as_strided, arguments, 4, NULL);
}

static PyObject *results_of(Program *self, PyObject **outputs) {
    if (self->results == Py_None) Py_RETURN_NONE;
    if (!PyList_Check(self->results)) return result_of(self->results, outputs);
    Py_ssize_t count = PyList_GET_SIZE(self->results);
    PyObject *results = PyTuple_New(count);
    for (Py_ssize_t i = 0; results && i < count; i++) {
        PyObject *result = result_of(PyList_GET_ITEM(self->results, i), outputs);
        if (!result) Py_CLEAR(results);
        else PyTuple_SET_ITEM(results, i, result);
    }
    return results;
}

/* Where an output lies: in a tensor of its own, in the block with others, or in the workspace. */
enum { TEMPORARY, OWN, STORED };

/* Say where each output lies, given which results are wanted and which are stored in the block. */
static void place_outputs(const Program *self, uint64_t wanted, uint64_t stored, char *place) {
    int has_several = self->results != Py_None && PyList_Check(self->results);
    int is_all = !has_several || wanted == ALL_RESULTS;
    memset(place, is_all ? OWN : TEMPORARY, self->num_outputs);
    if (is_all) return;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->results); i++) {
        Py_ssize_t output = output_of(PyList_GET_ITEM(self->results, i));
        if (i < 64 && stored >> i & 1) place[output] = STORED;
        else if (i >= 64 || wanted >> i & 1) place[output] = OWN;
    }
}

/* Return a tensor of so many bytes, and its address. */
static PyObject *allocate_bytes(const Program *self, Py_ssize_t size, uint64_t *address) {
    PyObject *shape = size == self->workspace ? Py_NewRef(self->workspace_size)
                                              : Py_BuildValue("(n)", size);
    PyObject *tensor = shape ? allocate_like(shape, self->unit_stride, byte_dtype, address) : NULL;
    Py_XDECREF(shape);
    return tensor;
}

/* Allocate the outputs and the workspace, run the steps, and return the results. Outputs that are
   not wanted share the workspace, and those that are stored share `block`, since each allocation
   takes the host as long as half a launch. */
static PyObject *run_program(Program *self, const Operands *call, uint64_t wanted, uint64_t stored,
                             PyObject **block) {
    uint64_t slots[MAX_SLOTS], of_block = 0;
    char place[MAX_SLOTS];
    PyObject *outputs[MAX_SLOTS], *workspace = NULL, *results = NULL, *streams = NULL;
    void *stream, *side = NULL, *event = NULL;
    Py_ssize_t size = self->workspace, block_size = 0;
    uint64_t *of_outputs = &slots[self->args], *of_workspace = of_outputs + self->num_outputs;
    for (int i = 0; i < self->args; i++) slots[i] = (uint64_t)(uintptr_t)call->views[i].data;
    for (Py_ssize_t i = 0; i < self->num_outputs; i++) outputs[i] = NULL;
    place_outputs(self, wanted, stored, place);
    for (Py_ssize_t i = 0; i < self->num_outputs; i++) {
        PyObject *spec = PyTuple_GET_ITEM(self->outputs, i);
        Py_ssize_t *total = place[i] == STORED ? &block_size : &size;
        if (place[i] != OWN) {
            of_outputs[i] = *total;
            *total += self->sizes[i];
            continue;
        }
        PyObject *shape = size_of(self, PyTuple_GET_ITEM(spec, 0), call->rows);
        if (shape)
            outputs[i] = allocate_like(shape, PyTuple_GET_ITEM(spec, 1), PyTuple_GET_ITEM(spec, 2),
                                       &of_outputs[i]);
        Py_XDECREF(shape);
        if (!outputs[i]) goto done;
    }
    if (size && !(workspace = allocate_bytes(self, size, of_workspace))) goto done;
    if (stored && !(*block = allocate_bytes(self, block_size, &of_block))) goto done;
    for (Py_ssize_t i = 0; i < self->num_outputs; i++)
        if (place[i] == STORED) of_outputs[i] += of_block;
        else if (place[i] == TEMPORARY && size) of_outputs[i] += *of_workspace;
    if (exchange->current_stream(device_type, call->device, &stream)) goto done;
    if (self->uses_side_stream) {
        unsigned long long side_handle, event_handle;
        streams = PyObject_CallFunction(side_stream, "i", call->device);
        if (!streams || !PyArg_ParseTuple(streams, "KK", &side_handle, &event_handle)) goto done;
        side = (void *)(uintptr_t)side_handle, event = (void *)(uintptr_t)event_handle;
    }
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = run_steps(self, slots, (uint64_t)call->rows, stream, side, event);
    Py_END_ALLOW_THREADS
    results = status ? raise_driver_error(status) : results_of(self, outputs);
done:
    if (stored && !results) Py_CLEAR(*block);
    for (Py_ssize_t i = 0; i < self->num_outputs; i++) Py_XDECREF(outputs[i]);
    Py_XDECREF(workspace);
    Py_XDECREF(streams);
    return results;
}
