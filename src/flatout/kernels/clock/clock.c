/* The clock of a training loop: what hooks ask several times in each step.

   In a step a hook finds the processor's caches full of other things, where every name that Python
   looks up costs as much as a call does here. */

#include "../shared/module.h"

#include <limits.h>
#include <structmember.h>

#include "core.h"
#include "hooks.h"

/* The lane that an argument names, or -1 with an error set. */
static int lane_of(PyObject *argument)
{
    long lane = PyLong_AsLong(argument);
    if (lane == -1 && PyErr_Occurred())
        return -1;
    if (lane < 0 || lane >= LANES) {
        PyErr_SetString(PyExc_IndexError, "no such lane");
        return -1;
    }
    return (int)lane;
}

/* Gives the time since the last change of lanes to the lane that ran, and returns that lane. */
static PyObject *clock_switch(PyObject *object, PyObject *argument)
{
    Clock *self = (Clock *)object;
    int lane = lane_of(argument), before = self->current;
    if (lane < 0)
        return NULL;
    pass_to(self, lane);
    return PyLong_FromLong(before);
}

/* As `switch`, in the thread of the clock; in another thread does nothing and returns -1. */
static PyObject *clock_enter(PyObject *object, PyObject *argument)
{
    if (!is_own_thread((Clock *)object))
        return PyLong_FromLong(-1);
    return clock_switch(object, argument);
}

/* A model is called. Returns the lane that runs; -1 in another thread, within a model, and while a
   batch is made, where it does nothing. */
static PyObject *clock_enter_model(PyObject *object, PyObject *nothing)
{
    Clock *self = (Clock *)object;
    (void)nothing;
    if (self->is_inside || self->current == INPUT || !is_own_thread(self))
        return PyLong_FromLong(-1);
    self->is_inside = 1;
    return PyLong_FromLong(self->current);
}

/* A batch is asked for: marks the lanes, and returns 0. Returns 1 without marking them if calls in
   evaluation are open, or no step has begun, so that the caller decides first. Returns -1 in another
   thread and while a batch is made, where it does nothing. */
static PyObject *clock_ask(PyObject *object, PyObject *nothing)
{
    Clock *self = (Clock *)object;
    (void)nothing;
    if (self->current == INPUT || !is_own_thread(self))
        return PyLong_FromLong(-1);
    pass_to(self, INPUT);
    self->asked = self->last;
    if (self->is_open || !(self->steps || self->backwards))
        return PyLong_FromLong(1);
    mark(self);
    return PyLong_FromLong(0);
}

/* The batch has come, and forward begins. Returns the nanoseconds that it was waited for. */
static PyObject *clock_take(PyObject *object, PyObject *nothing)
{
    Clock *self = (Clock *)object;
    (void)nothing;
    pass_to(self, FORWARD);
    return PyLong_FromLongLong(self->last - self->asked);
}

/* Keeps the present state of the lanes and the backward passes. */
static PyObject *clock_mark(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    mark((Clock *)object);
    Py_RETURN_NONE;
}

/* Forgets the mark. */
static PyObject *clock_unmark(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    ((Clock *)object)->is_marked = 0;
    Py_RETURN_NONE;
}

/* As `switch`, and counts one more backward pass. */
static PyObject *clock_leave_backward(PyObject *object, PyObject *argument)
{
    PyObject *before = clock_switch(object, argument);
    if (before != NULL)
        ((Clock *)object)->backwards += 1;
    return before;
}

/* Moves nanoseconds from one lane to another. */
static PyObject *clock_shift(PyObject *object, PyObject *args)
{
    Clock *self = (Clock *)object;
    PyObject *before, *after;
    long long ns;
    int from, to;
    if (!PyArg_ParseTuple(args, "LOO:shift", &ns, &before, &after))
        return NULL;
    from = lane_of(before);
    to = from < 0 ? -1 : lane_of(after);
    if (to < 0)
        return NULL;
    self->spent[from] -= ns;
    self->spent[to] += ns;
    Py_RETURN_NONE;
}

/* A step has ended at the last change of lanes; with `merge` it belongs to the step before. Forgets
   the mark. Returns whether that step, or its end, is due. */
static PyObject *clock_lap(PyObject *object, PyObject *argument)
{
    int merge = PyObject_IsTrue(argument);
    if (merge < 0)
        return NULL;
    return PyBool_FromLong(end_step((Clock *)object, merge));
}

/* A step has ended, and the host's time begins. Returns 1 if the step is due, else 0; -1 in another
   thread, where it does nothing. */
static PyObject *clock_leave_step(PyObject *object, PyObject *nothing)
{
    Clock *self = (Clock *)object;
    (void)nothing;
    if (!is_own_thread(self))
        return PyLong_FromLong(-1);
    pass_to(self, HOST);
    return PyLong_FromLong(end_step(self, 0));
}

static PyObject *list_of(const long long *numbers, Py_ssize_t count)
{
    PyObject *list = PyList_New(count), *number;
    for (Py_ssize_t place = 0; list != NULL && place < count; place++) {
        number = PyLong_FromLongLong(numbers[place]);
        if (number == NULL || PyList_SetItem(list, place, number) < 0)
            Py_CLEAR(list);
    }
    return list;
}

/* Returns the durations of the latest steps, oldest first, without evaluation and saving. */
static PyObject *clock_step_ns(PyObject *object, PyObject *args)
{
    Clock *self = (Clock *)object;
    PyObject *list, *number;
    long long count = KEPT, first;
    if (!PyArg_ParseTuple(args, "|L:step_ns", &count))
        return NULL;
    count = count < 0 ? 0 : count < KEPT ? count : KEPT;
    count = count < self->steps ? count : self->steps;
    first = self->steps - count;
    list = PyList_New((Py_ssize_t)count);
    for (long long place = 0; list != NULL && place < count; place++) {
        number = PyLong_FromLongLong(self->durations[(first + place) % KEPT]);
        if (number == NULL || PyList_SetItem(list, (Py_ssize_t)place, number) < 0)
            Py_CLEAR(list);
    }
    return list;
}

static PyObject *clock_spent(PyObject *object, void *nothing)
{
    (void)nothing;
    return list_of(((Clock *)object)->spent, LANES);
}

static PyObject *clock_first(PyObject *object, void *nothing)
{
    (void)nothing;
    return list_of(((Clock *)object)->first, LANES);
}

/* None where nothing is marked. */
static PyObject *clock_before(PyObject *object, void *nothing)
{
    Clock *self = (Clock *)object;
    (void)nothing;
    if (!self->is_marked)
        Py_RETURN_NONE;
    return list_of(self->before, LANES);
}

static int clock_set_spent(PyObject *object, PyObject *value, void *nothing)
{
    long long numbers[LANES];
    PyObject *number;
    (void)nothing;
    if (value == NULL || PySequence_Size(value) != LANES) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "spent takes one number for each lane");
        return -1;
    }
    for (int lane = 0; lane < LANES; lane++) {
        number = PySequence_GetItem(value, lane);
        if (number == NULL)
            return -1;
        numbers[lane] = PyLong_AsLongLong(number);
        Py_DECREF(number);
        if (numbers[lane] == -1 && PyErr_Occurred())
            return -1;
    }
    memcpy(((Clock *)object)->spent, numbers, sizeof numbers);
    return 0;
}

static PyObject *clock_loader(PyObject *object, void *nothing)
{
    PyObject *loader = ((Clock *)object)->loader;
    (void)nothing;
    return Py_NewRef(loader == NULL ? Py_None : loader);
}

static int clock_set_loader(PyObject *object, PyObject *value, void *nothing)
{
    (void)nothing;
    set_loader((Clock *)object, value == Py_None ? NULL : value);
    return 0;
}

static PyObject *clock_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Clock *self = (Clock *)alloc(type, 0);
    (void)args;
    (void)names;
    if (self == NULL)
        return NULL;
    self->durations = PyMem_Calloc(KEPT, sizeof *self->durations);
    if (self->durations == NULL) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static int clock_init(PyObject *object, PyObject *args, PyObject *names)
{
    static char *known[] = {NULL};
    Clock *self = (Clock *)object;
    if (!PyArg_ParseTupleAndKeywords(args, names, ":Clock", known))
        return -1;
    memset(self->spent, 0, sizeof self->spent);
    memset(self->first, 0, sizeof self->first);
    self->steps = self->backwards = self->between = self->after = 0;
    self->seen_backwards = self->kept_graphs = 0;
    self->is_inside = self->is_open = self->is_marked = self->is_counted = 0;
    self->is_trained_on = self->wants_told = 0;
    Py_CLEAR(self->loader);
    Py_CLEAR(self->evaluations);
    self->evaluations = PyList_New(0);
    if (self->evaluations == NULL)
        return -1;
    self->due = self->until = LLONG_MAX;
    self->current = HOST;
    self->thread = PyThread_get_thread_ident();
    self->last = self->began = self->asked = now_ns();
    return 0;
}

static void clock_dealloc(PyObject *object)
{
    PyMem_Free(((Clock *)object)->durations);
    Py_CLEAR(((Clock *)object)->loader);
    Py_CLEAR(((Clock *)object)->evaluations);
    release(object);
}

static PyMemberDef members[] = {
    {"thread", T_ULONG, offsetof(Clock, thread), 0, "Whose clock it is."},
    {"last", T_LONGLONG, offsetof(Clock, last), 0, "When it was looked at."},
    {"began", T_LONGLONG, offsetof(Clock, began), 0, "When the step that is open began."},
    {"current", T_INT, offsetof(Clock, current), 0, "The lane for which it runs."},
    {"steps", T_LONGLONG, offsetof(Clock, steps), 0, "How many have ended."},
    {"backwards", T_LONGLONG, offsetof(Clock, backwards), 0, "Backward passes since then."},
    {"between", T_LONGLONG, offsetof(Clock, between), 0, "Evaluation and saving until then."},
    {"is_inside", T_BOOL, offsetof(Clock, is_inside), 0, "Whether a model is being called."},
    {"is_open", T_BOOL, offsetof(Clock, is_open), 0, "Whether it is undecided what calls were."},
    {"is_counted", T_BOOL, offsetof(Clock, is_counted), 0, "Whether the step that runs was."},
    {"is_trained_on", T_BOOL, offsetof(Clock, is_trained_on), 0, "Whether its batches are."},
    {"wants_told", T_BOOL, offsetof(Clock, wants_told), 0, "Whether Python says what they were."},
    {"evaluations", T_OBJECT, offsetof(Clock, evaluations), READONLY, "The models of those calls."},
    {"seen_backwards", T_LONGLONG, offsetof(Clock, seen_backwards), 0, "Those at the mark."},
    {"due", T_LONGLONG, offsetof(Clock, due), 0, "The number of steps to be called at."},
    {"until", T_LONGLONG, offsetof(Clock, until), 0, "The time to be called at."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"spent", clock_spent, clock_set_spent, "Nanoseconds by lane.", NULL},
    {"first", clock_first, NULL, "Those after the first step.", NULL},
    {"before", clock_before, NULL, "Those at the mark; None without one.", NULL},
    {"loader", clock_loader, clock_set_loader, "What gave the latest batch, or None.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    {"switch", clock_switch, METH_O, NULL},
    {"enter", clock_enter, METH_O, NULL},
    {"enter_model", clock_enter_model, METH_NOARGS, NULL},
    {"leave_backward", clock_leave_backward, METH_O, NULL},
    {"shift", clock_shift, METH_VARARGS, NULL},
    {"lap", clock_lap, METH_O, NULL},
    {"leave_step", clock_leave_step, METH_NOARGS, NULL},
    {"ask", clock_ask, METH_NOARGS, NULL},
    {"take", clock_take, METH_NOARGS, NULL},
    {"mark", clock_mark, METH_NOARGS, NULL},
    {"unmark", clock_unmark, METH_NOARGS, NULL},
    {"step_ns", clock_step_ns, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot clock_slots[] = {
    {Py_tp_doc, "Clock()\n--\n\nThe clock of a training loop."},
    {Py_tp_new, clock_new},
    {Py_tp_init, clock_init},
    {Py_tp_dealloc, clock_dealloc},
    {Py_tp_members, members},
    {Py_tp_getset, properties},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec clock_spec = {
    .name = "flatout.kernels._clock.Clock",
    .basicsize = sizeof(Clock),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .slots = clock_slots,
};

/* Makes a type and adds it to the module, where it stays as long as the process does. */
static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromSpec(spec);
    if (type != NULL && PyModule_AddType(module, (PyTypeObject *)type) < 0)
        Py_CLEAR(type);
    return (PyTypeObject *)type;
}

static int execute(PyObject *module)
{
    retain_graph_name = PyUnicode_InternFromString("retain_graph");
    training_name = PyUnicode_InternFromString("training");
    seen_name = PyUnicode_InternFromString("_flatout_seen");
    if (retain_graph_name == NULL || training_name == NULL || seen_name == NULL)
        return -1;
    clock_type = add_type(module, &clock_spec);
    called_type = add_type(module, &called_spec);
    loaded_type = add_type(module, &loaded_spec);
    if (clock_type == NULL || called_type == NULL || loaded_type == NULL)
        return -1;
    for (size_t place = 0; place < sizeof hook_specs / sizeof *hook_specs; place++) {
        if (add_type(module, &hook_specs[place]) == NULL)
            return -1;
    }
    return 0;
}

MODULE(_clock, "The clock of a training loop.", NULL, {Py_mod_exec, execute},)
