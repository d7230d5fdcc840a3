/* Hooks for the calls of a step that are like those before: during training, where caches are full of
   other things, a hook in Python takes several times as long. Whatever else is called is handed to
   the hook in Python, `otherwise`, in whose place this one stands. */

#ifndef FLATOUT_CLOCK_HOOKS_H
#define FLATOUT_CLOCK_HOOKS_H

#include <stddef.h>
#include <structmember.h>

#include "core.h"

/* Vectorcall, with which arguments are handed on as they came: Python 3.11 has it, and the limited API
   names it from 3.12 on, unchanged. */
#if defined(Py_LIMITED_API) && Py_LIMITED_API < 0x030C0000
typedef PyObject *(*vectorcallfunc)(PyObject *, PyObject *const *, size_t, PyObject *);
#define Py_TPFLAGS_HAVE_VECTORCALL (1UL << 11)
#define PY_VECTORCALL_ARGUMENTS_OFFSET ((size_t)1 << (8 * sizeof(size_t) - 1))
PyAPI_FUNC(PyObject *) PyObject_Vectorcall(PyObject *, PyObject *const *, size_t, PyObject *);
PyAPI_FUNC(PyObject *) PyVectorcall_Call(PyObject *, PyObject *, PyObject *);
#endif

/* So many calls that keep their graph are handed on: which line makes them is known by then. */
#define KEPT_GRAPHS 40

static PyObject *retain_graph_name, *training_name, *seen_name; /* interned */
static PyTypeObject *clock_type, *called_type, *loaded_type;

/* What all of them have; a backward pass needs no more. */
typedef struct {
    PyObject_HEAD
    PyObject *clock;
    PyObject *original;  /* what is hooked into */
    PyObject *otherwise; /* the hook in Python */
    PyObject *names;     /* its __dict__ */
    vectorcallfunc call;
    long long ran, handed; /* calls that Python was not asked about, and some of the others */
} Hook;

typedef struct {
    Hook hook;
    PyObject *known;           /* a Called by the id of its model */
    PyObject *is_grad_enabled; /* torch's */
    PyObject *latest;          /* the Called that was found last, or NULL */
} ForwardHook;

typedef struct {
    PyObject_HEAD
    PyObject *clock;
    PyObject *begins, *ends; /* the hooks in Python */
    PyObject *attend;        /* called where a step is due */
    PyObject *sole;          /* a weak reference to the one optimizer that steps, or None */
    PyObject *counts;        /* how many backward passes went into its steps, and how often */
    long long each, often;   /* the latest of those steps, which are not in counts yet */
    long long ran;
} StepHook;

/* One model, and how often it was called. */
typedef struct {
    PyObject_HEAD
    PyObject *ref; /* a weak one */
    long long calls, due;
    char has_parameters;
    /* Modes without gradients, 1 in eval mode and 2 in train mode: of an evaluation that goes on; of
       calls that were a part of a step whenever they came from this line; and, with 4 and 8 those with
       gradients, of which it is not known yet what they were. */
    int goes_on, is_part, opened;
    char acts; /* whether it is called without gradients before it is trained in most steps */
    PyObject *code; /* of that line, or NULL */
    int line;
} Called;

/* One DataLoader, and how many batches it has given. */
typedef struct {
    PyObject_HEAD
    long long batches, due;
    PyObject *keep;     /* called with the nanoseconds that a batch was waited for, or NULL */
    char wants_samples; /* whether it is asked which samples batches are made of */
    char wants_within;  /* whether it is looked at how they are made */
} Loaded;

static Clock *clock_of(PyObject *clock)
{
    return (Clock *)clock;
}

/* Whether a weak reference is to this object: 1, 0, or -1 with an error set. */
static int refers_to(PyObject *weak, PyObject *object)
{
    if (weak == NULL || weak == Py_None)
        return 0;
#if defined(Py_LIMITED_API) || PY_VERSION_HEX < 0x030D0000
    PyObject *found = PyWeakref_GetObject(weak);
    if (found == NULL)
        return -1;
    return found == object;
#else
    PyObject *found;
    if (PyWeakref_GetRef(weak, &found) < 0)
        return -1;
    Py_XDECREF(found);
    return found == object;
#endif
}

static int hook_traverse(PyObject *object, visitproc visit, void *arg)
{
    Hook *self = (Hook *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->clock);
    Py_VISIT(self->original);
    Py_VISIT(self->otherwise);
    Py_VISIT(self->names);
    return 0;
}

static int hook_clear(PyObject *object)
{
    Hook *self = (Hook *)object;
    Py_CLEAR(self->clock);
    Py_CLEAR(self->original);
    Py_CLEAR(self->otherwise);
    Py_CLEAR(self->names);
    return 0;
}

static void hook_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    hook_clear(object);
    release(object);
}

/* What all of them begin with, once it is clear of what it had. */
static void set_hook(Hook *self, PyObject *clock, PyObject *original, PyObject *otherwise,
                     vectorcallfunc call)
{
    self->clock = Py_NewRef(clock);
    self->original = Py_NewRef(original);
    self->otherwise = Py_NewRef(otherwise);
    self->call = call;
}

static int plain_init(PyObject *object, PyObject *args, PyObject *names, vectorcallfunc call)
{
    static char *known[] = {"clock", "original", "otherwise", NULL};
    PyObject *clock, *original, *otherwise;
    if (!PyArg_ParseTupleAndKeywords(args, names, "O!OO:Hook", known, clock_type, &clock, &original,
                                     &otherwise))
        return -1;
    hook_clear(object);
    set_hook((Hook *)object, clock, original, otherwise, call);
    return 0;
}

/* Whether a call of torch.autograd.backward keeps its graph; -1 with an error set. */
static int keeps_graph(PyObject *const *args, size_t places, PyObject *names)
{
    Py_ssize_t count = names == NULL ? 0 : PyTuple_Size(names);
    int is_it;
    if (places > 2)
        return PyObject_IsTrue(args[2]);
    for (Py_ssize_t at = 0; at < count; at++) {
        is_it = PyObject_RichCompareBool(PyTuple_GetItem(names, at), retain_graph_name, Py_EQ);
        if (is_it)
            return is_it < 0 ? -1 : PyObject_IsTrue(args[places + (size_t)at]);
    }
    return 0;
}

static PyObject *backward_call(PyObject *object, PyObject *const *args, size_t flagged,
                               PyObject *names)
{
    Hook *self = (Hook *)object;
    Clock *clock = clock_of(self->clock);
    PyObject *result;
    int before = clock->current;
    int keeps = keeps_graph(args, flagged & ~PY_VECTORCALL_ARGUMENTS_OFFSET, names);
    if (keeps < 0)
        return NULL;
    keeps = keeps && clock->kept_graphs < KEPT_GRAPHS;
    clock->kept_graphs += keeps;
    if (keeps || before == BACKWARD || (clock->loader != NULL && !clock->is_trained_on)
        || !is_own_thread(clock))
        return PyObject_Vectorcall(self->otherwise, args, flagged, names);
    self->ran += 1;
    pass_to(clock, BACKWARD);
    result = PyObject_Vectorcall(self->original, args, flagged, names);
    /* LBFGS calls it within its step. */
    pass_to(clock, before == OPTIMIZER ? OPTIMIZER : AFTER);
    clock->backwards += 1;
    return result;
}

static int backward_init(PyObject *object, PyObject *args, PyObject *names)
{
    return plain_init(object, args, names, backward_call);
}

static PyObject *hook_renew(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    ((Hook *)object)->ran = ((Hook *)object)->handed = 0;
    Py_RETURN_NONE;
}

/* The Loaded that an iterator over a DataLoader is known by, as a new reference; NULL, with no error
   set, where there is none. */
static PyObject *loaded_of(PyObject *iterator)
{
    PyObject *seen = PyObject_GetAttr(iterator, seen_name);
    if (seen == NULL)
        PyErr_Clear(); /* it is asked again, in Python */
    else if (!PyObject_TypeCheck(seen, loaded_type))
        Py_CLEAR(seen);
    return seen;
}

/* A batch comes from this loader: of another one it is not known whether it is trained on. */
static void set_loader(Clock *clock, PyObject *loader)
{
    PyObject *old = clock->loader;
    if (old == loader)
        return;
    clock->is_trained_on = 0;
    clock->loader = Py_XNewRef(loader);
    Py_XDECREF(old);
}

/* The batch has come that was asked for: 0, or -1 with an error set. */
static int was_given(Clock *clock, Loaded *seen)
{
    PyObject *waited, *kept;
    pass_to(clock, FORWARD);
    seen->batches += 1;
    if (seen->keep == NULL)
        return 0;
    waited = PyLong_FromLongLong(clock->last - clock->asked);
    if (waited == NULL)
        return -1;
    kept = PyObject_CallFunctionObjArgs(seen->keep, waited, NULL);
    Py_DECREF(waited);
    Py_XDECREF(kept);
    return kept == NULL ? -1 : 0;
}

static PyObject *batch_call(PyObject *object, PyObject *const *args, size_t flagged,
                            PyObject *names)
{
    Hook *self = (Hook *)object;
    Clock *clock = clock_of(self->clock);
    PyObject *batch, *seen = NULL;
    int is_open = clock->is_open || !(clock->steps || clock->backwards);
    if ((flagged & ~PY_VECTORCALL_ARGUMENTS_OFFSET) && !is_open && clock->current != INPUT
        && is_own_thread(clock))
        seen = loaded_of(args[0]);
    if (seen == NULL || ((Loaded *)seen)->batches + 1 >= ((Loaded *)seen)->due) {
        Py_XDECREF(seen);
        return PyObject_Vectorcall(self->otherwise, args, flagged, names);
    }
    pass_to(clock, INPUT);
    clock->asked = clock->last;
    mark(clock);
    set_loader(clock, seen);
    batch = PyObject_Vectorcall(self->original, args, flagged, names);
    self->ran += batch != NULL;
    if (batch == NULL)
        pass_to(clock, HOST);
    else if (was_given(clock, (Loaded *)seen) < 0)
        Py_CLEAR(batch);
    Py_DECREF(seen);
    return batch;
}

static int batch_init(PyObject *object, PyObject *args, PyObject *names)
{
    return plain_init(object, args, names, batch_call);
}

static PyObject *samples_call(PyObject *object, PyObject *const *args, size_t flagged,
                              PyObject *names)
{
    Hook *self = (Hook *)object;
    PyObject *seen =
        flagged & ~PY_VECTORCALL_ARGUMENTS_OFFSET ? loaded_of(args[0]) : NULL;
    int is_wanted = seen == NULL || ((Loaded *)seen)->wants_samples;
    Py_XDECREF(seen);
    self->ran += !is_wanted;
    return PyObject_Vectorcall(is_wanted ? self->otherwise : self->original, args, flagged, names);
}

static int samples_init(PyObject *object, PyObject *args, PyObject *names)
{
    return plain_init(object, args, names, samples_call);
}

static PyObject *fetch_call(PyObject *object, PyObject *const *args, size_t flagged,
                            PyObject *names)
{
    Hook *self = (Hook *)object;
    Clock *clock = clock_of(self->clock);
    PyObject *loader = clock->loader;
    int is_wanted = loader != NULL
                    && (!PyObject_TypeCheck(loader, loaded_type)
                        || ((Loaded *)loader)->wants_within)
                    && is_own_thread(clock);
    self->ran += !is_wanted;
    return PyObject_Vectorcall(is_wanted ? self->otherwise : self->original, args, flagged, names);
}

static int fetch_init(PyObject *object, PyObject *args, PyObject *names)
{
    return plain_init(object, args, names, fetch_call);
}

static int forward_traverse(PyObject *object, visitproc visit, void *arg)
{
    ForwardHook *self = (ForwardHook *)object;
    Py_VISIT(self->known);
    Py_VISIT(self->is_grad_enabled);
    Py_VISIT(self->latest);
    return hook_traverse(object, visit, arg);
}

static int forward_clear(PyObject *object)
{
    ForwardHook *self = (ForwardHook *)object;
    Py_CLEAR(self->known);
    Py_CLEAR(self->is_grad_enabled);
    Py_CLEAR(self->latest);
    return hook_clear(object);
}

static void forward_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    forward_clear(object);
    release(object);
}

/* Makes the Called of a model the latest one, if it is known: 1, 0, or -1 with an error set. */
static int find(ForwardHook *self, PyObject *module)
{
    PyObject *key, *seen, *old = self->latest;
    int is_it = old == NULL ? 0 : refers_to(((Called *)old)->ref, module);
    if (is_it)
        return is_it;
    key = PyLong_FromVoidPtr(module);
    if (key == NULL)
        return -1;
    seen = PyDict_GetItemWithError(self->known, key);
    Py_DECREF(key);
    if (seen == NULL)
        return PyErr_Occurred() ? -1 : 0;
    if (!PyObject_TypeCheck(seen, called_type))
        return 0;
    self->latest = Py_NewRef(seen);
    Py_XDECREF(old);
    return refers_to(((Called *)seen)->ref, module);
}

/* Whether the call that runs comes from the line from which it was a part of a step. */
static int is_from_line(const Called *seen)
{
    PyFrameObject *frame = PyEval_GetFrame();
    PyCodeObject *code;
    if (frame == NULL || seen->code == NULL)
        return 0;
    code = PyFrame_GetCode(frame);
    Py_DECREF(code); /* the frame has it */
    return (PyObject *)code == seen->code && PyFrame_GetLineNumber(frame) == seen->line;
}

/* It is called in this mode, as a part of a step if nothing says otherwise: 1, or -1 with an error
   set. */
static int open_again(Clock *clock, Called *seen, int mode)
{
    long long backwards = clock->seen_backwards;
    if (PyList_Append(clock->evaluations, (PyObject *)seen) < 0)
        return -1;
    if (!clock->is_open && !clock->is_marked) {
        pass_to(clock, clock->current); /* what came before it is none of its */
        mark(clock);
        clock->seen_backwards = backwards; /* of the step, not of this call */
    }
    clock->is_open = 1;
    seen->opened |= mode;
    seen->goes_on |= mode;
    return 1;
}

/* The open calls were a part of the step that ends: 0, or -1 with an error set. */
static int close_calls(Clock *clock)
{
    Py_ssize_t count = PyList_Size(clock->evaluations);
    for (Py_ssize_t at = 0; at < count; at++) {
        PyObject *seen = PyList_GetItem(clock->evaluations, at);
        if (PyObject_TypeCheck(seen, called_type))
            ((Called *)seen)->opened = ((Called *)seen)->goes_on = 0;
    }
    clock->is_open = 0;
    return PyList_SetSlice(clock->evaluations, 0, count, NULL);
}

/* Of a model that acts: what follows is the host's again. */
#define IS_ACT 2

/* Whether a model is called as before, to be trained, in an evaluation that goes on, or without
   gradients as a part of a step: nothing is to be looked at but the time. Its Called is the latest
   one then. -1 with an error set. */
static int is_as_before(ForwardHook *self, PyObject *module)
{
    Clock *clock = clock_of(self->hook.clock);
    Called *seen;
    PyObject *trains, *grad;
    int is_known, mode;
    if (!clock->steps)
        return 0;
    is_known = find(self, module);
    if (is_known <= 0)
        return is_known;
    seen = (Called *)self->latest;
    if (!seen->has_parameters)
        return 0;
    trains = PyObject_GenericGetAttr(module, training_name); /* its __getattr__ is for others */
    if (trains == NULL) {
        PyErr_Clear(); /* it is asked again, in Python */
        return 0;
    }
    Py_DECREF(trains);
    if (trains != Py_True && trains != Py_False)
        return 0;
    grad = PyObject_CallNoArgs(self->is_grad_enabled);
    if (grad == NULL)
        return -1;
    Py_DECREF(grad);
    if (grad == Py_True)
        return trains == Py_True && (!seen->opened || (seen->acts && seen->opened == 2))
               && seen->calls + 1 < seen->due;
    mode = 1 << (trains == Py_True);
    is_known = 1;
    if (!(clock->is_open && (seen->goes_on & mode)))
        is_known = seen->is_part == mode && is_from_line(seen) ? open_again(clock, seen, mode) : 0;
    return is_known == 1 && seen->acts ? IS_ACT : is_known;
}

static PyObject *forward_call(PyObject *object, PyObject *const *args, size_t flagged,
                              PyObject *names)
{
    ForwardHook *self = (ForwardHook *)object;
    Clock *clock = clock_of(self->hook.clock);
    PyObject *result;
    int is_known, before = clock->current;
    /* Within a model, and while a batch is made, no one asks. */
    if (clock->is_inside || clock->current == INPUT || !is_own_thread(clock))
        return PyObject_Vectorcall(self->hook.original, args, flagged, names);
    is_known = flagged & ~PY_VECTORCALL_ARGUMENTS_OFFSET ? is_as_before(self, args[0]) : 0;
    if (is_known < 0)
        return NULL;
    if (!is_known) {
        self->hook.handed += 1;
        return PyObject_Vectorcall(self->hook.otherwise, args, flagged, names);
    }
    self->hook.ran += 1;
    ((Called *)self->latest)->calls += 1;
    clock->is_inside = 1;
    if (before == HOST || before == AFTER)
        pass_to(clock, FORWARD);
    result = PyObject_Vectorcall(self->hook.original, args, flagged, names);
    clock->is_inside = 0;
    if (is_known == IS_ACT && (before == HOST || before == AFTER))
        pass_to(clock, before);
    return result;
}

static int forward_init(PyObject *object, PyObject *args, PyObject *names)
{
    static char *known_names[] = {"clock", "original", "otherwise", "known", "is_grad_enabled",
                                  NULL};
    ForwardHook *self = (ForwardHook *)object;
    PyObject *clock, *original, *otherwise, *known, *is_grad_enabled;
    if (!PyArg_ParseTupleAndKeywords(args, names, "O!OOO!O:ForwardHook", known_names, clock_type,
                                     &clock, &original, &otherwise, &PyDict_Type, &known,
                                     &is_grad_enabled))
        return -1;
    forward_clear(object);
    set_hook(&self->hook, clock, original, otherwise, forward_call);
    self->known = Py_NewRef(known);
    self->is_grad_enabled = Py_NewRef(is_grad_enabled);
    return 0;
}

static PyObject *forward_renew(PyObject *object, PyObject *nothing)
{
    Py_CLEAR(((ForwardHook *)object)->latest);
    return hook_renew(object, nothing);
}

/* Looked up on an object of the class that it is an attribute of, it is a method of that. */
static PyObject *hook_get(PyObject *object, PyObject *instance, PyObject *owner)
{
    PyObject *types, *method;
    (void)owner;
    if (instance == NULL || instance == Py_None)
        return Py_NewRef(object);
    types = PyImport_ImportModule("types");
    if (types == NULL)
        return NULL;
    method = PyObject_CallMethod(types, "MethodType", "OO", object, instance);
    Py_DECREF(types);
    return method;
}

static int steps_traverse(PyObject *object, visitproc visit, void *arg)
{
    StepHook *self = (StepHook *)object;
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(self->clock);
    Py_VISIT(self->begins);
    Py_VISIT(self->ends);
    Py_VISIT(self->attend);
    Py_VISIT(self->sole);
    Py_VISIT(self->counts);
    return 0;
}

static int steps_clear(PyObject *object)
{
    StepHook *self = (StepHook *)object;
    Py_CLEAR(self->clock);
    Py_CLEAR(self->begins);
    Py_CLEAR(self->ends);
    Py_CLEAR(self->attend);
    Py_CLEAR(self->sole);
    Py_CLEAR(self->counts);
    return 0;
}

static void steps_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    steps_clear(object);
    release(object);
}

static int steps_init(PyObject *object, PyObject *args, PyObject *names)
{
    static char *known[] = {"clock", "begins", "ends", "attend", NULL};
    StepHook *self = (StepHook *)object;
    PyObject *clock, *begins, *ends, *attend;
    if (!PyArg_ParseTupleAndKeywords(args, names, "O!OOO:StepHook", known, clock_type, &clock,
                                     &begins, &ends, &attend))
        return -1;
    steps_clear(object);
    self->clock = Py_NewRef(clock);
    self->begins = Py_NewRef(begins);
    self->ends = Py_NewRef(ends);
    self->attend = Py_NewRef(attend);
    return 0;
}

/* An optimizer's step begins. */
static PyObject *steps_begin(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    StepHook *self = (StepHook *)object;
    Clock *clock = clock_of(self->clock);
    if (clock->steps < 2 || !is_own_thread(clock))
        return PyObject_Vectorcall(self->begins, args, (size_t)count, NULL);
    pass_to(clock, OPTIMIZER);
    clock->is_counted = 0;
    Py_RETURN_NONE;
}

/* Puts the latest steps of the sole optimizer into its counts. */
static int put_counts(StepHook *self)
{
    PyObject *key, *old, *more;
    long long often = self->often;
    int failed;
    self->often = 0;
    if (often == 0 || self->counts == NULL)
        return 0;
    key = PyLong_FromLongLong(self->each);
    if (key == NULL)
        return -1;
    old = PyDict_GetItemWithError(self->counts, key);
    if (old == NULL && PyErr_Occurred()) {
        Py_DECREF(key);
        return -1;
    }
    more = PyLong_FromLongLong(old == NULL ? often : PyLong_AsLongLong(old) + often);
    failed = more == NULL || PyDict_SetItem(self->counts, key, more) < 0;
    Py_XDECREF(more);
    Py_DECREF(key);
    return failed ? -1 : 0;
}

/* An optimizer's step has ended. */
static PyObject *steps_end(PyObject *object, PyObject *const *args, Py_ssize_t count)
{
    StepHook *self = (StepHook *)object;
    Clock *clock = clock_of(self->clock);
    int is_sole = 0;
    if (count > 0 && !clock->is_counted && !(clock->is_open && clock->wants_told)
        && is_own_thread(clock)) {
        is_sole = refers_to(self->sole, args[0]);
        if (is_sole < 0)
            return NULL;
    }
    if (!is_sole)
        return PyObject_Vectorcall(self->ends, args, (size_t)count, NULL);
    if (clock->backwards != self->each && put_counts(self) < 0)
        return NULL;
    self->each = clock->backwards;
    self->often += 1;
    self->ran += 1;
    pass_to(clock, HOST);
    clock->is_counted = 1;
    if (clock->is_open && close_calls(clock) < 0)
        return NULL;
    if (end_step(clock, 0))
        return PyObject_CallNoArgs(self->attend);
    Py_RETURN_NONE;
}

/* Brings the counts up to date. */
static PyObject *steps_count(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    if (put_counts((StepHook *)object) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Sets the optimizer whose steps these are, as a weak reference, and the dict that counts its steps by
   their backward passes; None and {} if there is no sole optimizer. */
static PyObject *steps_watch(PyObject *object, PyObject *args)
{
    StepHook *self = (StepHook *)object;
    PyObject *sole, *counts, *old;
    if (!PyArg_ParseTuple(args, "OO!:watch", &sole, &PyDict_Type, &counts) || put_counts(self) < 0)
        return NULL;
    old = self->sole;
    self->sole = Py_NewRef(sole);
    Py_XDECREF(old);
    old = self->counts;
    self->counts = Py_NewRef(counts);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

static PyObject *steps_renew(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    ((StepHook *)object)->ran = ((StepHook *)object)->often = 0;
    Py_RETURN_NONE;
}

static void called_dealloc(PyObject *object)
{
    Py_CLEAR(((Called *)object)->ref);
    Py_CLEAR(((Called *)object)->code);
    release(object);
}

static void loaded_dealloc(PyObject *object)
{
    PyObject_GC_UnTrack(object);
    Py_CLEAR(((Loaded *)object)->keep);
    release(object);
}

static int loaded_traverse(PyObject *object, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE(object));
    Py_VISIT(((Loaded *)object)->keep);
    return 0;
}

static int loaded_clear(PyObject *object)
{
    Py_CLEAR(((Loaded *)object)->keep);
    return 0;
}

static PyMemberDef hook_members[] = {
    {"ran", T_LONGLONG, offsetof(Hook, ran), READONLY, "Calls that Python was not asked about."},
    {"handed", T_LONGLONG, offsetof(Hook, handed), READONLY,
     "Calls of models, but for those within others, that it was asked about."},
    {"__dictoffset__", T_PYSSIZET, offsetof(Hook, names), READONLY, NULL},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Hook, call), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyMemberDef steps_members[] = {
    {"ran", T_LONGLONG, offsetof(StepHook, ran), READONLY, "Steps that Python was not asked about."},
    {NULL, 0, 0, 0, NULL},
};

static PyMemberDef called_members[] = {
    {"ref", T_OBJECT, offsetof(Called, ref), 0, "A weak reference to the model."},
    {"calls", T_LONGLONG, offsetof(Called, calls), 0, "How often it was called."},
    {"due", T_LONGLONG, offsetof(Called, due), 0, "The call that is looked at next."},
    {"has_parameters", T_BOOL, offsetof(Called, has_parameters), 0, "Whether it has any."},
    {"goes_on", T_INT, offsetof(Called, goes_on), 0,
     "Modes of an evaluation without gradients that goes on: 1 in eval mode, 2 in train mode."},
    {"is_part", T_INT, offsetof(Called, is_part), 0, "That in which a line calls it in a step."},
    {"acts", T_BOOL, offsetof(Called, acts), 0,
     "Whether it is called without gradients before it is trained in most steps."},
    {"opened", T_INT, offsetof(Called, opened), 0, "Those of open calls; 4 and 8 with gradients."},
    {"code", T_OBJECT, offsetof(Called, code), 0, "That of this line."},
    {"line", T_INT, offsetof(Called, line), 0, "Its number."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef steps_methods[] = {
    {"begin", (PyCFunction)(void (*)(void))steps_begin, METH_FASTCALL, NULL},
    {"end", (PyCFunction)(void (*)(void))steps_end, METH_FASTCALL, NULL},
    {"count", steps_count, METH_NOARGS, NULL},
    {"watch", steps_watch, METH_VARARGS, NULL},
    {"renew", steps_renew, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef loaded_members[] = {
    {"batches", T_LONGLONG, offsetof(Loaded, batches), 0, "How many it has given."},
    {"due", T_LONGLONG, offsetof(Loaded, due), 0, "The batch that is looked at next."},
    {"keep", T_OBJECT, offsetof(Loaded, keep), 0, "Gets how long each was waited for, in ns."},
    {"wants_samples", T_BOOL, offsetof(Loaded, wants_samples), 0,
     "Whether it is asked which samples batches are made of."},
    {"wants_within", T_BOOL, offsetof(Loaded, wants_within), 0,
     "Whether it is looked at how batches are made in this process."},
    {NULL, 0, 0, 0, NULL},
};

static PyMethodDef hook_methods[] = {
    {"renew", hook_renew, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMethodDef forward_methods[] = {
    {"renew", forward_renew, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef hook_properties[] = {
    {"__dict__", PyObject_GenericGetDict, PyObject_GenericSetDict, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

#define SLOTS(init, doc)                                                                           \
    {                                                                                              \
        {Py_tp_doc, doc}, {Py_tp_init, init}, {Py_tp_new, PyType_GenericNew},                      \
            {Py_tp_traverse, hook_traverse}, {Py_tp_clear, hook_clear},                            \
            {Py_tp_dealloc, hook_dealloc}, {Py_tp_call, PyVectorcall_Call},                        \
            {Py_tp_descr_get, hook_get}, {Py_tp_methods, hook_methods},                            \
            {Py_tp_members, hook_members}, {Py_tp_getset, hook_properties}, {0, NULL},             \
    }

static PyType_Slot backward_slots[] = SLOTS(backward_init, "Stands for torch.autograd.backward.");
static PyType_Slot batch_slots[] =
    SLOTS(batch_init, "Stands for the __next__ of a DataLoader's iterator.");
static PyType_Slot samples_slots[] =
    SLOTS(samples_init, "Stands for what says which samples its next batch is made of.");
static PyType_Slot fetch_slots[] =
    SLOTS(fetch_init, "Stands for what makes a batch in the process that steps.");

static PyType_Slot forward_slots[] = {
    {Py_tp_doc, "ForwardHook(clock, original, otherwise, known, is_grad_enabled)\n--\n\n"
                "Stands for the __call__ of a class of models."},
    {Py_tp_init, forward_init},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_traverse, forward_traverse},
    {Py_tp_clear, forward_clear},
    {Py_tp_dealloc, forward_dealloc},
    {Py_tp_call, PyVectorcall_Call},
    {Py_tp_descr_get, hook_get},
    {Py_tp_methods, forward_methods},
    {Py_tp_members, hook_members},
    {Py_tp_getset, hook_properties},
    {0, NULL},
};

static PyType_Slot steps_slots[] = {
    {Py_tp_doc, "StepHook(clock, begins, ends, attend)\n--\n\nHooks into an optimizer's steps."},
    {Py_tp_init, steps_init},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_traverse, steps_traverse},
    {Py_tp_clear, steps_clear},
    {Py_tp_dealloc, steps_dealloc},
    {Py_tp_members, steps_members},
    {Py_tp_methods, steps_methods},
    {0, NULL},
};

static PyType_Slot called_slots[] = {
    {Py_tp_doc, "Called()\n--\n\nOne model, and how often it was called."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_dealloc, called_dealloc},
    {Py_tp_members, called_members},
    {0, NULL},
};

static PyType_Slot loaded_slots[] = {
    {Py_tp_doc, "Loaded()\n--\n\nOne DataLoader, and how many batches it has given."},
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_traverse, loaded_traverse},
    {Py_tp_clear, loaded_clear},
    {Py_tp_dealloc, loaded_dealloc},
    {Py_tp_members, loaded_members},
    {0, NULL},
};

#define OF_A_HOOK (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC)
#define OF_A_CALL (OF_A_HOOK | Py_TPFLAGS_HAVE_VECTORCALL)
#define OF_A_METHOD (OF_A_CALL | Py_TPFLAGS_METHOD_DESCRIPTOR)

static PyType_Spec hook_specs[] = {
    {"flatout.kernels._clock.BackwardHook", sizeof(Hook), 0, OF_A_CALL, backward_slots},
    {"flatout.kernels._clock.BatchHook", sizeof(Hook), 0, OF_A_METHOD, batch_slots},
    {"flatout.kernels._clock.SamplesHook", sizeof(Hook), 0, OF_A_METHOD, samples_slots},
    {"flatout.kernels._clock.FetchHook", sizeof(Hook), 0, OF_A_METHOD, fetch_slots},
    {"flatout.kernels._clock.ForwardHook", sizeof(ForwardHook), 0, OF_A_METHOD, forward_slots},
    {"flatout.kernels._clock.StepHook", sizeof(StepHook), 0, OF_A_HOOK, steps_slots},
};

static PyType_Spec called_spec = {"flatout.kernels._clock.Called", sizeof(Called), 0,
                                  Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE, called_slots};
static PyType_Spec loaded_spec = {"flatout.kernels._clock.Loaded", sizeof(Loaded), 0,
                                  OF_A_HOOK | Py_TPFLAGS_BASETYPE, loaded_slots};

#endif
