/* The C module that launches kernels with little host time. `launcher.py` builds and documents it.

   Parts. This file has the table of the driver's functions, keys, kernels, `launch`, and the start
   of the module. `programs.c` runs the recorded work of an op, and `replay.c` finds the program of
   a call. They are one source text. It reads tensors through DLPack's C exchange API and gets the
   driver's functions as addresses, so it needs no header of PyTorch and links with nothing.

   References. `setup` keeps its arguments for ever, and the global variables borrow from them. A
   Kernel owns the compiled code and the objects whose addresses its key has. A Program owns its
   kernels and constant tables, but no argument of a call. The dictionaries that Python fills own
   both, so a function here takes a reference to what it found until it has returned: a program may
   be dropped meanwhile. A key is compared by value. It names an object by its address only if the
   entry owns the object, if the object lives for ever, as a dtype does, or if Python drops the
   entry when the object is freed. Arguments are borrowed from the caller. Outputs belong to the
   results; the workspace is freed when all is launched, and PyTorch gives its memory to later work
   of the same stream only. These types take no part in garbage collection, as ops live for ever.

   Threads. Any thread may call, a thread of autograd's too. The GIL is held, except around the
   driver's launches, which read the stack, a Kernel or a Program, none of which changes. No test
   runs it without the GIL, so the module does not declare that it could: a Python that can do
   without then turns the GIL on.

   Errors. What a key cannot describe, and an exception while a key is made, is NotImplemented:
   Python serves the call and raises what there is to raise. A failed allocation of PyTorch is
   raised as it is, before any launch. An error of the driver is a RuntimeError with the driver's
   text; the streams are joined, and the results dropped. An entry of the wrong type or size is a
   TypeError, ValueError or IndexError, and nothing is launched. Nothing is tried again. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <structmember.h>

#define MAX_KEY 4096        /* bytes of a key; longer calls take the slow path */
#define MAX_ARGS 64         /* arguments of an op or of a kernel */
#define MAX_SLOTS 128       /* arguments, outputs and the workspace of a program */
#define MAX_PARAMETERS 96   /* parameters of a kernel */
#define ALIGNMENT 127       /* the bits of an address that a plan may depend on */

/* ---- DLPack's C exchange API, version 1 ---- */

typedef struct { int32_t type, index; } Device;
typedef struct { uint8_t code, bits; uint16_t lanes; } Type;
typedef struct {
    char *data;
    Device device;
    int32_t ndim;
    Type dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} View;
typedef struct {
    struct { uint32_t major, minor; } version;
    void *previous, *allocate, *export_object, *import_object;
    int (*describe)(void *object, View *view);
    int (*current_stream)(int32_t type, int32_t index, void **stream);
} Exchange;

static int device_type;  /* of the tensors that are served, in DLPack's numbers: 2 for CUDA */

/* ---- the driver ---- */

typedef struct {
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                  void *, void **, void **);
    int (*fill)(uint64_t, unsigned, size_t, void *);
    int (*record_event)(void *, void *);
    int (*wait_event)(void *, void *, unsigned);
    int (*get_device)(int *);
    int (*retain_context)(void **, int);
    int (*set_context)(void *);
    int (*error_string)(int, const char **);
} Driver;

/* These and the names below stay as `setup` and the module's start have left them. */
static Driver driver;
static const Exchange *exchange;
static PyObject *tensor_type, *parameter_type, *dtype_type;
static PyObject *allocate, *current_device;  /* functions, for PyTorch's current device */
static PyObject *knobs, *side_stream;
static PyObject *name_enter_hook, *name_exit_hook, *name_calls, *name_version, *name_as_strided;
static PyObject *is_neg;  /* the method of tensors */

/* Return whether a device is PyTorch's current one, where it allocates, and let the driver, which
   launches, have it as its current one too. The driver has none in a new thread. It has another one
   after PyTorch went back to a device without a context, which PyTorch only notes. */
static int is_current(int device) {
    PyObject *of_pytorch = PyObject_CallNoArgs(current_device);
    if (!of_pytorch) { PyErr_Clear(); return 0; }
    int is_same = PyLong_AsLong(of_pytorch) == device, of_driver;
    Py_DECREF(of_pytorch);
    if (!is_same) { PyErr_Clear(); return 0; }
    if (driver.get_device(&of_driver) == 0 && of_driver == device) return 1;
    void *context;
    return !driver.retain_context(&context, device) && !driver.set_context(context);
}

static void raise_driver_error(int status) {
    const char *text = NULL;
    if (driver.error_string(status, &text) || !text) text = "unknown error";
    PyErr_Format(PyExc_RuntimeError, "launch of a kernel failed: %s (%d)", text, status);
}

/* Return whether profilers have asked to see launches, which only Triton's launcher reports. */
static int has_hook(PyObject *name) {
    PyObject *chain = PyObject_GetAttr(knobs, name), *calls = NULL;
    if (chain && chain != Py_None) calls = PyObject_GetAttr(chain, name_calls);
    int is_empty = calls && PyList_Check(calls) && PyList_GET_SIZE(calls) == 0;
    int found = chain != Py_None && !is_empty;
    PyErr_Clear();
    Py_XDECREF(chain);
    Py_XDECREF(calls);
    return found;
}

static int has_hooks(void) { return has_hook(name_enter_hook) || has_hook(name_exit_hook); }

/* Return a new reference to the value of a key, which has to be of a type of this module, or NULL,
   with an exception after an error only. */
static void *look_up(PyTypeObject *type, PyObject *dict, PyObject *key) {
    PyObject *value = Py_XNewRef(PyDict_GetItemWithError(dict, key));
    if (value && !Py_IS_TYPE(value, type)) {
        PyErr_Format(PyExc_TypeError, "expected a %s, got %R", type->tp_name, value);
        Py_CLEAR(value);
    }
    return value;
}

/* ---- keys ---- */

/* An initializer would write all of the bytes. */
typedef struct { Py_ssize_t used; char bytes[MAX_KEY]; } Key;

static int put(Key *key, const void *bytes, Py_ssize_t size) {
    if (size > MAX_KEY - key->used) return 0;
    memcpy(key->bytes + key->used, bytes, size);
    key->used += size;
    return 1;
}

static int put_tagged(Key *key, char tag, const void *bytes, Py_ssize_t size) {
    return put(key, &tag, 1) && put(key, bytes, size);
}

static int is_tensor(PyObject *arg) {
    return (PyObject *)Py_TYPE(arg) == tensor_type || (PyObject *)Py_TYPE(arg) == parameter_type;
}

/* Describe a tensor on a device that is served, whose memory holds its values as they are; return 0
   for any other. */
static int describe(PyObject *arg, View *view) {
    if (exchange->describe(arg, view)) { PyErr_Clear(); return 0; }
    view->data += view->byte_offset;
    if (view->device.type != device_type || view->dtype.code == 5) return 0;  /* 5: complex */
    if (view->dtype.code == 2 || view->dtype.code == 4) {  /* only these may be negated views */
        PyObject *negated = PyObject_CallOneArg(is_neg, arg);
        if (negated != Py_False) { PyErr_Clear(); Py_XDECREF(negated); return 0; }
        Py_DECREF(negated);
    }
    if (view->data) return 1;
    for (int i = 0; i < view->ndim; i++) if (view->shape[i] == 0) return 1;
    return 0;  /* a tensor of zeros without memory */
}

/* Add a value that is no tensor by its type and value. Objects count by identity. */
static int put_value(Key *key, PyObject *arg) {
    if (arg == Py_None) return put(key, "N", 1);
    if (PyBool_Check(arg)) return put(key, arg == Py_True ? "T" : "F", 1);
    if (PyLong_CheckExact(arg)) {
        int overflow;
        long long value = PyLong_AsLongLongAndOverflow(arg, &overflow);
        return !overflow && put_tagged(key, 'i', &value, sizeof value);
    }
    if (PyFloat_CheckExact(arg)) {
        double value = PyFloat_AS_DOUBLE(arg);
        return put_tagged(key, 'f', &value, sizeof value);
    }
    if (PyUnicode_CheckExact(arg)) {
        Py_ssize_t size;
        const char *text = PyUnicode_AsUTF8AndSize(arg, &size);
        if (!text) { PyErr_Clear(); return 0; }
        return put_tagged(key, 's', &size, sizeof size) && put(key, text, size);
    }
    if (PyList_CheckExact(arg)) {  /* of integers */
        Py_ssize_t size = PyList_GET_SIZE(arg);
        int is_put = put_tagged(key, 'l', &size, sizeof size);
        for (Py_ssize_t i = 0; is_put && i < size && i < PyList_GET_SIZE(arg); i++) {
            PyObject *item = PyList_GET_ITEM(arg, i);
            is_put = PyLong_CheckExact(item) && put_value(key, item);
        }
        return is_put;
    }
    return put_tagged(key, 'o', &arg, sizeof arg);
}

/* Return whether an op may have this argument: a constant that is compared by its value. */
static int is_constant(PyObject *arg) {
    return arg == Py_None || PyBool_Check(arg) || PyLong_CheckExact(arg) ||
           PyFloat_CheckExact(arg) || PyUnicode_CheckExact(arg) ||
           (PyObject *)Py_TYPE(arg) == dtype_type;
}

/* ---- kernels ---- */

typedef struct {
    PyObject_HEAD
    void *function;
    unsigned block, shared;
    int count;
    struct { int arg; char type; } parameters[MAX_PARAMETERS];
    PyObject *keep, *description;
} Kernel;

static void kernel_dealloc(Kernel *self) {
    Py_XDECREF(self->keep);
    Py_XDECREF(self->description);
    PyObject_Free(self);
}

static PyMemberDef kernel_members[] = {
    {"description", T_OBJECT_EX, offsetof(Kernel, description), READONLY,
     "function, threads, bytes of shared memory, and (argument, type) of each parameter"},
    {NULL}};

static PyObject *kernel_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    unsigned long long function;
    unsigned block, shared;
    PyObject *parameters, *keep;
    if (!PyArg_ParseTuple(args, "KIIO!O", &function, &block, &shared, &PyTuple_Type, &parameters,
                          &keep))
        return NULL;
    Py_ssize_t count = PyTuple_GET_SIZE(parameters);
    if (count + 2 > MAX_PARAMETERS)
        return PyErr_Format(PyExc_ValueError, "expected at most %d parameters, got %zd",
                            MAX_PARAMETERS - 2, count);
    Kernel *self = PyObject_New(Kernel, type);
    if (!self) return NULL;
    self->function = (void *)(uintptr_t)function;
    self->block = block, self->shared = shared, self->count = (int)count;
    self->keep = Py_NewRef(keep);
    self->description = Py_BuildValue("KIIO", function, block, shared, parameters);
    int is_read = self->description != NULL;
    for (Py_ssize_t i = 0; is_read && i < count; i++) {
        int arg, letter;
        is_read = PyArg_ParseTuple(PyTuple_GET_ITEM(parameters, i), "iC", &arg, &letter);
        if (is_read) self->parameters[i].arg = arg, self->parameters[i].type = (char)letter;
    }
    if (!is_read) Py_CLEAR(self);
    return (PyObject *)self;
}

static PyTypeObject kernel_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "partita.runtime.Kernel",
    .tp_basicsize = sizeof(Kernel),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_doc = "Kernel(function, threads, shared, parameters, keep): a compiled kernel.",
    .tp_new = kernel_new,
    .tp_dealloc = (destructor)kernel_dealloc,
    .tp_members = kernel_members,
};

/* Convert a number to a kernel parameter; return 0 and set an exception where it cannot be. */
static int pack(PyObject *arg, char type, uint64_t *cell) {
    if (type == 'i') {
        *cell = (uint64_t)PyLong_AsUnsignedLongLongMask(arg);
        return !PyErr_Occurred();
    }
    double value = PyFloat_AsDouble(arg);
    if (value == -1.0 && PyErr_Occurred()) return 0;
    float narrow = (float)value;
    *cell = 0;
    if (type == 'd') memcpy(cell, &value, sizeof value);
    else memcpy(cell, &narrow, sizeof narrow);
    return 1;
}

/* Add what Triton compiles a kernel for: an integer counts as 1, as a multiple of 16 and as beyond
   32 bits, a float does not count, and a tensor counts by its dtype and its alignment to 16.
   Return 0 for any other object, such as a tensor of a subclass, whose memory is not known here. */
static int put_specialization(Key *key, PyObject *arg, View *view, int *device) {
    if (is_tensor(arg)) {
        if (!describe(arg, view) || (*device >= 0 && *device != view->device.index)) return 0;
        *device = view->device.index;
        char is_aligned = ((uintptr_t)view->data & 15) == 0;
        char properties[] = {(char)view->dtype.code, (char)view->dtype.bits, is_aligned};
        return put_tagged(key, 't', properties, sizeof properties);
    }
    if (PyLong_CheckExact(arg)) {
        int overflow;
        long long value = PyLong_AsLongLongAndOverflow(arg, &overflow);
        if (overflow) return 0;
        int wide = value < INT32_MIN || value > INT32_MAX;
        char kind = value == 1 ? '1' : value % 16 == 0 ? (wide ? 'W' : 'D') : (wide ? 'w' : 'd');
        return put(key, &kind, 1);
    }
    if (PyFloat_CheckExact(arg)) return put(key, "f", 1);
    return is_constant(arg) && put_value(key, arg);
}

/* The tensors of a call of an op, or all arguments of a launch, of tuples one by one. */
typedef struct {
    PyObject *values[MAX_ARGS];
    View views[MAX_ARGS];
    int count, device;
} Arguments;

/* Add an argument, or each member of a tuple, whose type says how a kernel reads it. */
static int put_argument(Key *key, PyObject *arg, Arguments *found) {
    if (PyTuple_Check(arg)) {
        PyTypeObject *type = Py_TYPE(arg);
        int is_put = put_tagged(key, '(', &type, sizeof type);
        for (Py_ssize_t i = 0; is_put && i < PyTuple_GET_SIZE(arg); i++)
            is_put = put_argument(key, PyTuple_GET_ITEM(arg, i), found);
        return is_put && put(key, ")", 1);
    }
    if (found->count == MAX_ARGS) return 0;
    int i = found->count++;
    found->values[i] = arg;
    return put_specialization(key, arg, &found->views[i], &found->device);
}

/* Add all that a launch depends on and return 1, or 0 where Triton has to launch. */
static int put_launch(Key *key, PyObject *function, PyObject *args, PyObject *options,
                      Arguments *found) {
    key->used = 0, found->count = 0, found->device = -1;
    if (!put(key, &function, sizeof function)) return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++)
        if (!put_argument(key, PyTuple_GET_ITEM(args, i), found)) return 0;
    Py_ssize_t position = 0;
    PyObject *name, *value;
    while (PyDict_Next(options, &position, &name, &value))
        if (!put_tagged(key, 'k', &name, sizeof name) || !put_value(key, value)) return 0;
    int device = found->device;
    return put(key, &device, sizeof device) && device >= 0 && is_current(device);
}

/* Launch a kernel for arguments with its key; return 0 and set an exception after an error. */
static int launch_kernel(const Kernel *kernel, unsigned programs, const Arguments *found) {
    uint64_t cells[MAX_PARAMETERS] = {0};
    void *pointers[MAX_PARAMETERS], *stream;
    for (int i = 0; i < kernel->count + 2; i++) pointers[i] = &cells[i];
    for (int i = 0; i < kernel->count; i++) {
        int arg = kernel->parameters[i].arg;
        char type = kernel->parameters[i].type;
        if (arg < 0 || arg >= found->count) {
            PyErr_Format(PyExc_IndexError, "a kernel has a parameter without an argument: %d", arg);
            return 0;
        }
        if (type == 'p') cells[i] = (uint64_t)(uintptr_t)found->views[arg].data;
        else if (!pack(found->values[arg], type, &cells[i])) return 0;
    }
    if (exchange->current_stream(device_type, found->device, &stream)) return 0;
    int status;
    Py_BEGIN_ALLOW_THREADS
    status = driver.launch(kernel->function, programs, 1, 1, kernel->block, 1, 1, kernel->shared,
                           stream, pointers, NULL);
    Py_END_ALLOW_THREADS
    if (status) raise_driver_error(status);
    return !status;
}

/* launch(kernels, function, programs, args, options)

   Launch the kernel that `kernels` holds for such arguments on the current stream, and return it.
   Return the key where there is none, or NotImplemented where Triton has to launch. */
static PyObject *launch(PyObject *module, PyObject *const *args, Py_ssize_t nargs) {
    if (nargs != 5 || !PyDict_Check(args[0]) || !PyTuple_Check(args[3]) || !PyDict_Check(args[4]))
        return PyErr_Format(PyExc_TypeError, "launch: expected (dict, function, int, tuple, dict)");
    long programs = PyLong_AsLong(args[2]);
    if (programs == -1 && PyErr_Occurred()) return NULL;
    Key key;
    Arguments found;
    if (programs < 1 || programs > INT32_MAX || has_hooks() ||
        !put_launch(&key, args[1], args[3], args[4], &found))
        Py_RETURN_NOTIMPLEMENTED;
    PyObject *bytes = PyBytes_FromStringAndSize(key.bytes, key.used);
    Kernel *kernel = bytes ? look_up(&kernel_type, args[0], bytes) : NULL;
    if (!kernel && !PyErr_Occurred()) return bytes;
    Py_XDECREF(bytes);
    if (kernel && !launch_kernel(kernel, (unsigned)programs, &found)) Py_CLEAR(kernel);
    return (PyObject *)kernel;
}

#include "programs.c"
#include "replay.c"

/* ---- the module ---- */

/* setup(device_type, tensor, parameter, dtype, allocate, current_device, exchange, knobs,
         side_stream, addresses) */
static PyObject *setup(PyObject *module, PyObject *args) {
    PyObject *api;
    const char *addresses;
    Py_ssize_t size;
    Py_INCREF(args);  /* for ever: another thread may still use what an earlier call stored */
    if (!PyArg_ParseTuple(args, "iOOOOOOOOy#", &device_type, &tensor_type, &parameter_type,
                          &dtype_type, &allocate, &current_device, &api, &knobs, &side_stream,
                          &addresses, &size))
        return NULL;
    exchange = PyCapsule_GetPointer(api, "dlpack_exchange_api");
    if (!exchange) return NULL;
    if (exchange->version.major != 1 || !exchange->describe || !exchange->current_stream)
        return PyErr_Format(PyExc_RuntimeError, "expected version 1 of DLPack's exchange");
    const uint64_t missing = 0;  /* a pointer has 64 bits, as in what Python packs */
    int is_whole = size == sizeof driver;
    for (Py_ssize_t i = 0; is_whole && i < size; i += sizeof missing)
        is_whole = memcmp(addresses + i, &missing, sizeof missing) != 0;
    if (!is_whole) return PyErr_Format(PyExc_ValueError, "a driver's function is missing");
    memcpy(&driver, addresses, sizeof driver);
    is_neg = PyObject_GetAttrString(tensor_type, "is_neg");
    if (!is_neg) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"setup", setup, METH_VARARGS, "Store what the other functions call."},
    {"launch", (PyCFunction)(void (*)(void))launch, METH_FASTCALL, "Launch one kernel."},
    {NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "partita_launcher", NULL, -1, functions};

PyMODINIT_FUNC PyInit_partita_launcher(void) {
    const struct { PyObject **name; const char *text; } names[] = {
        {&name_enter_hook, "launch_enter_hook"}, {&name_exit_hook, "launch_exit_hook"},
        {&name_calls, "calls"}, {&name_version, "_version"}, {&name_as_strided, "as_strided"}};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!(*names[i].name = PyUnicode_InternFromString(names[i].text))) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (!module) return NULL;
    if (PyModule_AddType(module, &kernel_type) || PyModule_AddType(module, &program_type) ||
        PyModule_AddType(module, &replay_type))
        Py_CLEAR(module);
    return module;
}
