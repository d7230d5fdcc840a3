/* A clock that always runs for one of several lanes: what hooks ask twice or more in each step.

   In a step a hook finds the processor's caches full of other things, where every name that Python
   looks up costs as much as a call does here. The Python twin is clock_twin.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <time.h>

typedef struct {
    PyObject_HEAD
    PyObject *spent; /* a list of int */
    unsigned long thread;
    long long last;
    int current;
} Clock;

/* As time.perf_counter_ns() on Linux. */
static long long now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (long long)now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* The time since the last look goes to the lane that ran. -1 with an error set. */
static int pass_time(Clock *self, long long now)
{
    PyObject *before, *after;
    long long sum;
    if (self->current < 0) {
        PyErr_SetString(PyExc_IndexError, "no such lane");
        return -1;
    }
    before = PyList_GetItem(self->spent, self->current);
    if (before == NULL)
        return -1;
    sum = PyLong_AsLongLong(before);
    if (sum == -1 && PyErr_Occurred())
        return -1;
    after = PyLong_FromLongLong(sum + (now - self->last));
    if (after == NULL || PyList_SetItem(self->spent, self->current, after) < 0)
        return -1;
    self->last = now;
    return 0;
}

/* The lane that an argument names, or -1 with an error set. */
static int lane_of(Clock *self, PyObject *argument)
{
    long lane = PyLong_AsLong(argument);
    if (lane == -1 && PyErr_Occurred())
        return -1;
    if (lane < 0 || lane >= PyList_Size(self->spent)) {
        PyErr_SetString(PyExc_IndexError, "no such lane");
        return -1;
    }
    return (int)lane;
}

static PyObject *change(Clock *self, int lane)
{
    int before = self->current;
    if (pass_time(self, now_ns()) < 0)
        return NULL;
    self->current = lane;
    return PyLong_FromLong(before);
}

PyDoc_STRVAR(switch_doc,
"switch(lane, /)\n--\n\n"
"The time since the last look goes to the lane that ran; returns that one.");

static PyObject *clock_switch(PyObject *object, PyObject *argument)
{
    Clock *self = (Clock *)object;
    int lane = lane_of(self, argument);
    return lane < 0 ? NULL : change(self, lane);
}

PyDoc_STRVAR(enter_doc,
"enter(lane, /)\n--\n\n"
"As `switch`, in the thread of the clock; in another one nothing happens and -1 is returned.");

static PyObject *clock_enter(PyObject *object, PyObject *argument)
{
    Clock *self = (Clock *)object;
    int lane = lane_of(self, argument);
    if (lane < 0)
        return NULL;
    if (PyThread_get_thread_ident() != self->thread)
        return PyLong_FromLong(-1);
    return change(self, lane);
}

static PyObject *clock_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Clock *self = (Clock *)alloc(type, 0);
    (void)args;
    (void)names;
    if (self == NULL)
        return NULL;
    self->spent = PyList_New(0);
    if (self->spent == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static int clock_init(PyObject *object, PyObject *args, PyObject *names)
{
    static char *known[] = {"lanes", "current", NULL};
    Clock *self = (Clock *)object;
    PyObject *zeros, *zero;
    int lanes, current, failed;
    if (!PyArg_ParseTupleAndKeywords(args, names, "ii:Clock", known, &lanes, &current))
        return -1;
    if (current < 0 || current >= lanes) {
        PyErr_SetString(PyExc_IndexError, "no such lane");
        return -1;
    }
    zeros = PyList_New(lanes);
    if (zeros == NULL)
        return -1;
    for (int lane = 0; lane < lanes; lane++) {
        zero = PyLong_FromLong(0);
        if (zero == NULL || PyList_SetItem(zeros, lane, zero) < 0) {
            Py_DECREF(zeros);
            return -1;
        }
    }
    /* In place: hooks hold the list. */
    failed = PyList_SetSlice(self->spent, 0, PyList_Size(self->spent), zeros) < 0;
    Py_DECREF(zeros);
    if (failed)
        return -1;
    self->current = current;
    self->thread = PyThread_get_thread_ident();
    self->last = now_ns();
    return 0;
}

static void clock_dealloc(PyObject *object)
{
    PyTypeObject *type = Py_TYPE(object);
    freefunc release = (freefunc)PyType_GetSlot(type, Py_tp_free);
    Py_XDECREF(((Clock *)object)->spent);
    release(object);
    Py_DECREF(type);
}

static PyMemberDef members[] = {
    {"spent", T_OBJECT_EX, offsetof(Clock, spent), READONLY, "Nanoseconds by lane."},
    {"thread", T_ULONG, offsetof(Clock, thread), 0, "Whose clock it is."},
    {"last", T_LONGLONG, offsetof(Clock, last), 0, "When it was looked at."},
    {"current", T_INT, offsetof(Clock, current), 0, "The lane for which it runs."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef methods[] = {
    {"switch", clock_switch, METH_O, switch_doc},
    {"enter", clock_enter, METH_O, enter_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot clock_slots[] = {
    {Py_tp_doc, "Clock(lanes, current)\n--\n\nA clock that always runs for one of its lanes."},
    {Py_tp_new, clock_new},
    {Py_tp_init, clock_init},
    {Py_tp_dealloc, clock_dealloc},
    {Py_tp_members, members},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec clock_spec = {
    .name = "flatout.kernels._clock.Clock",
    .basicsize = sizeof(Clock),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = clock_slots,
};

static int execute(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&clock_spec);
    int failed;
    if (type == NULL)
        return -1;
    failed = PyModule_AddType(module, (PyTypeObject *)type);
    Py_DECREF(type);
    return failed;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, execute},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_clock",
    .m_doc = "A clock that always runs for one of several lanes.",
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__clock(void)
{
    return PyModuleDef_Init(&definition);
}
