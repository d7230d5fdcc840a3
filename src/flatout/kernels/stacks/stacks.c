/* Which lines a thread runs, looked at from beside it.

   A native thread reads the chain of a Python thread's frames about a hundred times a second. It takes no
   lock of Python's: a thread that waits for the interpreter gets it where the watched one lets go of
   it, and would see those lines alone. Memory is read through the kernel, so that a frame that goes away meanwhile
   costs a look and nothing else.

   Where in memory the frames are is not written down here: it is looked for among frames whose code is
   known, and where they are not found nothing is watched. What is kept of a frame is the address of its
   code, and its instruction: whose they are is asked at the end. */

#define _GNU_SOURCE

#include "../shared/module.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <structmember.h>
#include <sys/uio.h>
#include <unistd.h>

#include "../clock/core.h"
#include "frames.h"
#include "tree.h"

/* Of a CPU that looking may take. It is twice as much until so many ns more were taken, for scripts
   that end soon. */
#define SHARE 0.0015
#define MORE_NS 1500000.0
#define FASTEST_NS 4000000LL
#define SLOWEST_NS 100000000LL

typedef struct {
    PyObject_HEAD
    Clock *clock;
    Layout layout;
    Tree tree;
    pthread_t ticker;
    pthread_mutex_t lock; /* of the tree */
    pid_t pid;
    unsigned long thread;
    atomic_int ends;
    char runs;
    long long cpu_ns, every_ns;
} Stacks;

static Stacks *active; /* at most one, changed with the interpreter held */

static long long thread_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (long long)now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* The frames above this call, innermost first: their codes, and where each is. Returns how many, -1
   with an error set. */
static int frames_above(Known *known, int most)
{
    PyObject *frame = Py_XNewRef((PyObject *)PyEval_GetFrame()), *code, *place, *back;
    int found = 0;
    while (frame != NULL && frame != Py_None && found < most) {
        code = PyObject_GetAttrString(frame, "f_code");
        place = PyObject_GetAttrString(frame, "f_lasti");
        back = PyObject_GetAttrString(frame, "f_back");
        Py_DECREF(frame);
        frame = back;
        if (code != NULL && place != NULL && back != NULL) {
            known[found].code = (uintptr_t)code; /* which its frame holds */
            known[found++].place = PyLong_AsLong(place);
        }
        Py_XDECREF(code);
        Py_XDECREF(place);
        if (PyErr_Occurred()) {
            Py_XDECREF(frame);
            return -1;
        }
    }
    Py_XDECREF(frame);
    return found;
}

/* One look, which stands for so many ns. */
static void look(Stacks *self, long long ns)
{
    static Known stack[DEEPEST];
    int lane = self->clock->current, depth = frames_of(&self->layout, stack, DEEPEST);
    if (depth <= 0)
        return;
    pthread_mutex_lock(&self->lock);
    tree_add(&self->tree, stack, depth, lane, self->clock->steps, (double)ns);
    pthread_mutex_unlock(&self->lock);
}

static void *run(void *argument)
{
    Stacks *self = argument;
    unsigned int random = 2463534242u; /* its own: looks at even distances would beat with steps */
    long long first = now_ns(), last = first, now, wait, began, least;
    double most, share;
    struct timespec pause;
    while (!atomic_load(&self->ends)) {
        random ^= random << 13;
        random ^= random >> 17;
        random ^= random << 5;
        wait = self->every_ns / 2 + (long long)(random % 1024u) * (self->every_ns / 1024);
        pause.tv_sec = wait / 1000000000LL;
        pause.tv_nsec = wait % 1000000000LL;
        nanosleep(&pause, NULL);
        now = now_ns();
        began = thread_ns();
        if (self->clock->thread == self->thread) /* else it does something of ours */
            look(self, now - last);
        last = now;
        self->cpu_ns = thread_ns();
        most = SHARE * (double)(now - first);
        share = most < MORE_NS ? 2 * SHARE : SHARE;
        most += most < MORE_NS ? most : MORE_NS;
        least = (long long)((double)(self->cpu_ns - began) / share);
        /* Towards what one look has taken, slowly: a single one is noise. All of them may take no more
           than their share: waking up costs, too. */
        self->every_ns += (least - self->every_ns) / 16;
        if ((double)self->cpu_ns > most)
            self->every_ns += self->every_ns / 8;
        if (self->every_ns < FASTEST_NS)
            self->every_ns = FASTEST_NS;
        if (self->every_ns > SLOWEST_NS)
            self->every_ns = SLOWEST_NS;
    }
    return NULL;
}

static void end(Stacks *self)
{
    if (!self->runs)
        return;
    self->runs = 0;
    if (active == self)
        active = NULL;
    if (self->pid != getpid())
        return; /* a forked process, which has no such thread */
    atomic_store(&self->ends, 1);
    Py_BEGIN_ALLOW_THREADS
    pthread_join(self->ticker, NULL);
    Py_END_ALLOW_THREADS
}

/* Looks at the thread that made this, from now on. One such clock's thread is watched at a
   time. */
static PyObject *stacks_start(PyObject *object, PyObject *nothing)
{
    Stacks *self = (Stacks *)object;
    sigset_t all, before;
    int failed;
    (void)nothing;
    if (self->runs)
        Py_RETURN_NONE;
    if (active != NULL)
        end(active);
    self->pid = getpid();
    atomic_store(&self->ends, 0);
    sigfillset(&all); /* signals are the script's */
    pthread_sigmask(SIG_BLOCK, &all, &before);
    failed = pthread_create(&self->ticker, NULL, run, self);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        PyErr_SetString(PyExc_RuntimeError, "no thread could be started to look at the script's lines");
        return NULL;
    }
    self->runs = 1;
    active = self;
    Py_RETURN_NONE;
}

/* Ends that. */
static PyObject *stacks_stop(PyObject *object, PyObject *nothing)
{
    (void)nothing;
    end((Stacks *)object);
    Py_RETURN_NONE;
}

/* Forgets what was seen. */
static PyObject *stacks_renew(PyObject *object, PyObject *nothing)
{
    Stacks *self = (Stacks *)object;
    (void)nothing;
    pthread_mutex_lock(&self->lock);
    tree_forget(&self->tree);
    pthread_mutex_unlock(&self->lock);
    Py_RETURN_NONE;
}

static PyObject *numbers(const double *values, int count)
{
    PyObject *list = PyList_New(count), *number;
    for (int at = 0; list != NULL && at < count; at++) {
        number = PyFloat_FromDouble(values[at]);
        if (number == NULL || PyList_SetItem(list, at, number) < 0)
            Py_CLEAR(list);
    }
    return list;
}

/* What was seen: a node for each place in a stack, as (its caller's number or -1, its code's
   id, instruction, looks that ended there, ns of them by lane, ns of them by bin of steps). A
   code that is gone may have left its id to another. */
static PyObject *stacks_seen(PyObject *object, PyObject *nothing)
{
    Stacks *self = (Stacks *)object;
    PyObject *list = PyList_New(0), *row;
    Node node;
    int count;
    (void)nothing;
    pthread_mutex_lock(&self->lock);
    count = self->tree.count;
    pthread_mutex_unlock(&self->lock);
    for (int at = 0; list != NULL && at < count; at++) {
        pthread_mutex_lock(&self->lock); /* the list of nodes may move as it grows */
        node = self->tree.nodes[at];
        pthread_mutex_unlock(&self->lock);
        row = Py_BuildValue("(iKliNN)", node.caller, (unsigned long long)node.code, node.place,
                            node.looks, numbers(node.lanes, LANES), numbers(node.bins, BINS));
        if (row == NULL || PyList_Append(list, row) < 0)
            Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static int stacks_init(PyObject *object, PyObject *args, PyObject *names)
{
    static char *accepted[] = {"clock", NULL};
    static Known known[NEEDED];
    Stacks *self = (Stacks *)object;
    PyObject *clock;
    int count;
    if (!PyArg_ParseTupleAndKeywords(args, names, "O:Stacks", accepted, &clock))
        return -1;
    if (self->clock != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "it watches already");
        return -1;
    }
    count = frames_above(known, NEEDED);
    if (count < 0)
        return -1;
    if (count < NEEDED || !find_frames(&self->layout, (uintptr_t)PyThreadState_Get(), known)) {
        PyErr_SetString(PyExc_OSError, "this Python's frames cannot be read from beside it");
        return -1;
    }
    if (!tree_make(&self->tree)) {
        PyErr_NoMemory();
        return -1;
    }
    self->clock = (Clock *)Py_NewRef(clock);
    self->thread = PyThread_get_thread_ident();
    self->every_ns = FASTEST_NS;
    return 0;
}

static PyObject *stacks_new(PyTypeObject *type, PyObject *args, PyObject *names)
{
    allocfunc alloc = (allocfunc)PyType_GetSlot(type, Py_tp_alloc);
    Stacks *self = (Stacks *)alloc(type, 0);
    (void)args;
    (void)names;
    if (self != NULL)
        pthread_mutex_init(&self->lock, NULL);
    return (PyObject *)self;
}

static void stacks_dealloc(PyObject *object)
{
    Stacks *self = (Stacks *)object;
    end(self);
    tree_free(&self->tree);
    Py_CLEAR(self->clock);
    release(object);
}

static PyObject *stacks_steps_per_bin(PyObject *object, void *nothing)
{
    (void)nothing;
    return PyLong_FromLongLong(((Stacks *)object)->tree.width);
}

static PyMemberDef members[] = {
    {"cpu_ns", T_LONGLONG, offsetof(Stacks, cpu_ns), READONLY, "Of a CPU, that looking has taken."},
    {"every_ns", T_LONGLONG, offsetof(Stacks, every_ns), READONLY, "From one look to the next."},
    {NULL, 0, 0, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"steps_per_bin", stacks_steps_per_bin, NULL, "Steps that a bin of a node stands for.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef methods[] = {
    {"start", stacks_start, METH_NOARGS, NULL},
    {"stop", stacks_stop, METH_NOARGS, NULL},
    {"renew", stacks_renew, METH_NOARGS, NULL},
    {"seen", stacks_seen, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot stacks_slots[] = {
    {Py_tp_doc, "Stacks(clock)\n--\n\n"
                "Looks at what the calling thread runs, while it is the thread of this clock.\n\n"
                "Raises:\n    OSError: the frames of this Python cannot be read."},
    {Py_tp_new, stacks_new},
    {Py_tp_init, stacks_init},
    {Py_tp_dealloc, stacks_dealloc},
    {Py_tp_members, members},
    {Py_tp_getset, properties},
    {Py_tp_methods, methods},
    {0, NULL},
};

static PyType_Spec stacks_spec = {
    .name = "flatout.kernels._stacks.Stacks",
    .basicsize = sizeof(Stacks),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = stacks_slots,
};

static int execute(PyObject *module)
{
    PyObject *type = PyType_FromSpec(&stacks_spec);
    int failed = type == NULL || PyModule_AddType(module, (PyTypeObject *)type) < 0;
    Py_XDECREF(type);
    return failed ? -1 : 0;
}

MODULE(_stacks, "Which lines a thread runs, looked at from beside it.", NULL,
       {Py_mod_exec, execute},)
