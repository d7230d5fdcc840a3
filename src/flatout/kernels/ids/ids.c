/* Ids of fields, and a number each: counting ids, and rows of a table by id.

   A table of slots, each two int64: the id, and field << 48 | number, of which 0 is an empty slot.
   A slot is looked for from the id's hash on. Everything that comes in is checked here: a wrong
   buffer is a ValueError, and what another thread writes meanwhile may give a wrong number, never a
   crash or a loop without end. */

#include "../shared/buffers.h"
#include "../shared/rows.h"

#define NUMBER_BITS 48
#define LARGEST (((uint64_t)1 << NUMBER_BITS) - 1)
#define FIELDS ((int64_t)1 << 15)
/* So many ids are hashed, and their slots fetched, before the first of them is looked for. */
#define AT_ONCE 64

/* Of (field, id): the finalizer of splitmix64 (Steele, Lea and Flood, 2014). */
static inline uint64_t hash_of(int64_t id, int64_t field)
{
    uint64_t h = (uint64_t)id + ((uint64_t)field + 1) * 0x9E3779B97F4A7C15u;
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9u;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBu;
    return h ^ (h >> 31);
}

/* The place of an id, or of the empty slot where it belongs; -1 in a table without either. */
static inline int64_t find(const int64_t *slots, uint64_t mask, uint64_t hash, int64_t id,
                           int64_t field)
{
    for (uint64_t step = 0; step <= mask; step++) {
        uint64_t place = (hash + step) & mask;
        uint64_t held = (uint64_t)read_once(slots, (int64_t)(2 * place + 1));
        if (held == 0)
            return (int64_t)place;
        if ((int64_t)(held >> NUMBER_BITS) == field && read_once(slots, (int64_t)(2 * place)) == id)
            return (int64_t)place;
    }
    return -1;
}

static int is_table(const Py_buffer *slots)
{
    Py_ssize_t count = slots->len / 16;
    if (holds(slots, "int64") && slots->len % 16 == 0 && count > 0 && (count & (count - 1)) == 0)
        return 1;
    PyErr_SetString(PyExc_ValueError, "slots: expected int64 of shape (a power of two, 2)");
    return 0;
}

static int are_fields(const Py_buffer *ids, const Py_buffer *fields)
{
    if (!holds(ids, "int64") || !holds(fields, "int64") || fields->len == 0 ||
        ids->len % fields->len != 0) {
        PyErr_SetString(PyExc_ValueError, "expected ids and fields of int64, a field for each of a row");
        return 0;
    }
    const int64_t *field = fields->buf;
    for (Py_ssize_t i = 0; i < fields->len / 8; i++) {
        if (field[i] < 0 || field[i] >= FIELDS) {
            PyErr_Format(PyExc_ValueError, "field %lld is not in 0..%lld", (long long)field[i],
                         (long long)FIELDS - 1);
            return 0;
        }
    }
    return 1;
}

/* Add `numbers` (1 each where it is None) to those of ids from place `start` on, until more
   than half of the slots would be used. Returns the place of the first id that is left, and the
   slots used. */
static PyObject *add(PyObject *module, PyObject *args)
{
    PyObject *slots_object, *ids_object, *fields_object, *numbers_object;
    Py_ssize_t start, used;
    Py_buffer views[4];
    memset(views, 0, sizeof views);
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOnn:add", &slots_object, &ids_object, &fields_object,
                          &numbers_object, &start, &used))
        return NULL;
    int wants = numbers_object != Py_None;
    if (!get_buffer(ids_object, &views[0], "ids", 0) ||
        !get_buffer(fields_object, &views[1], "fields", 0) ||
        !get_buffer(slots_object, &views[2], "slots", 1) ||
        (wants && !get_buffer(numbers_object, &views[3], "numbers", 0)) || !is_table(&views[2]) ||
        !are_fields(&views[0], &views[1]))
        goto fail;
    const int64_t *ids = views[0].buf, *fields = views[1].buf, *numbers = wants ? views[3].buf : NULL;
    Py_ssize_t count = views[0].len / 8, width = views[1].len / 8, at = start;
    int64_t *slots = views[2].buf;
    uint64_t mask = (uint64_t)(views[2].len / 16) - 1;
    if (start < 0 || used < 0 || (wants && (!holds(&views[3], "int64") || views[3].len != views[0].len))) {
        PyErr_SetString(PyExc_ValueError, "expected a number of int64 for each id, and places from 0 on");
        goto fail;
    }
    int full = 0;
    Py_BEGIN_ALLOW_THREADS
    while (at < count && !full) {
        uint64_t hashes[AT_ONCE];
        Py_ssize_t some = count - at < AT_ONCE ? count - at : AT_ONCE;
        for (Py_ssize_t i = 0; i < some; i++) {
            hashes[i] = hash_of(read_once(ids, at + i), fields[(at + i) % width] & (FIELDS - 1));
            __builtin_prefetch(&slots[2 * (hashes[i] & mask)], 1);
        }
        for (Py_ssize_t i = 0; i < some; i++, at++) {
            int64_t id = read_once(ids, at), field = fields[at % width] & (FIELDS - 1);
            int64_t place = find(slots, mask, hashes[i], id, field);
            int is_new = place >= 0 && slots[2 * place + 1] == 0;
            if (place < 0 || (is_new && (uint64_t)(used + 1) * 2 > mask + 1)) {
                full = 1;
                break;
            }
            uint64_t number = (uint64_t)slots[2 * place + 1] & LARGEST;
            number = (number + (uint64_t)(wants ? read_once(numbers, at) : 1)) & LARGEST;
            slots[2 * place] = id;
            slots[2 * place + 1] = (int64_t)((uint64_t)field << NUMBER_BITS | number);
            used += is_new;
        }
    }
    Py_END_ALLOW_THREADS
    release(views, 4);
    return Py_BuildValue("nn", at, used);
fail:
    release(views, 4);
    return NULL;
}

/* Write the row of each id: its number less 1, or, of an id that is not there, the first row of
   its field's buckets and its hash modulo them. Returns the place of the first id that has
   neither, or -1. */
static PyObject *rows(PyObject *module, PyObject *args)
{
    static const char *const names[] = {"slots", "ids", "fields", "firsts", "buckets", "out"};
    PyObject *objects[6];
    Py_buffer views[6];
    memset(views, 0, sizeof views);
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOO:rows", &objects[0], &objects[1], &objects[2], &objects[3],
                          &objects[4], &objects[5]))
        return NULL;
    for (int i = 0; i < 6; i++) {
        if (!get_buffer(objects[i], &views[i], names[i], i == 5))
            goto fail;
    }
    if (!is_table(&views[0]) || !are_fields(&views[1], &views[2]))
        goto fail;
    if (!holds(&views[3], "int64") || !holds(&views[4], "int64") || !holds(&views[5], "int64") ||
        views[3].len != views[2].len || views[4].len != views[2].len ||
        views[5].len != views[1].len) {
        PyErr_SetString(PyExc_ValueError, "firsts, buckets, out: expected int64, as fields and ids");
        goto fail;
    }
    const int64_t *slots = views[0].buf, *ids = views[1].buf, *fields = views[2].buf;
    const int64_t *firsts = views[3].buf, *buckets = views[4].buf;
    Py_ssize_t count = views[1].len / 8, width = views[2].len / 8, column = 0, bad = -1;
    uint64_t mask = (uint64_t)(views[0].len / 16) - 1;
    int64_t *out = views[5].buf;
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t at = 0; at < count;) {
        uint64_t hashes[AT_ONCE];
        int64_t here[AT_ONCE], held[AT_ONCE], columns[AT_ONCE];
        Py_ssize_t some = count - at < AT_ONCE ? count - at : AT_ONCE;
        for (Py_ssize_t i = 0; i < some; i++) {
            here[i] = read_once(ids, at + i);
            columns[i] = column;
            held[i] = fields[column] & (FIELDS - 1);
            hashes[i] = hash_of(here[i], held[i]);
            __builtin_prefetch(&slots[2 * (hashes[i] & mask)]);
            column = column + 1 == width ? 0 : column + 1;
        }
        for (Py_ssize_t i = 0; i < some; i++, at++) {
            int64_t place = find(slots, mask, hashes[i], here[i], held[i]);
            uint64_t number =
                place < 0 ? 0 : (uint64_t)read_once(slots, 2 * place + 1) & LARGEST;
            uint64_t room = (uint64_t)read_once(buckets, columns[i]);
            if (number > 0)
                out[at] = (int64_t)(number - 1);
            else if (room > 0)
                out[at] = read_once(firsts, columns[i]) + (int64_t)(hashes[i] % room);
            else {
                out[at] = 0;
                bad = bad < 0 ? at : bad;
            }
        }
    }
    Py_END_ALLOW_THREADS
    release(views, 6);
    return PyLong_FromSsize_t(bad);
fail:
    release(views, 6);
    return NULL;
}

static PyMethodDef methods[] = {
    {"add", add, METH_VARARGS, NULL},
    {"rows", rows, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

MODULE(_ids, "Rows of a table by id.", methods)
