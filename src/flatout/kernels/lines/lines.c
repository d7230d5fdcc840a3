/* Lines of a text, byte ranges of a file, and rows of bytes to and from columns.

   A wrong buffer is a ValueError and a wrong index an IndexError, never a crash. __init__.py checks
   the range of text to index. The work is done in core.h. */

#include "../shared/buffers.h"
#include "core.h"

/* `count` of int64, or any number of them where it is -1. */
static int get_int64(PyObject *object, Py_buffer *view, const char *name, int64_t count,
                     int is_written)
{
    return get_buffer(object, view, name, is_written) && is_row(view, name, "int64", count);
}

static int get_bytes(PyObject *object, Py_buffer *view, const char *name, int dims,
                     int is_written)
{
    if (!get_buffer(object, view, name, is_written))
        return 0;
    if (view->ndim == dims && holds(view, "uint8"))
        return 1;
    PyErr_Format(PyExc_ValueError, "%s: expected uint8 in %d dimension(s), found %d of %zd bytes",
                 name, dims, view->ndim, view->itemsize);
    return 0;
}

/* ---- lines ---- */

/* Fill `starts` and `ends` (int64) from `count` on with the lines of `text[start:stop]`.
   Returns how many they hold now, and where the next line begins: at `stop`, or before if they
   are full. */
static PyObject *index_(PyObject *module, PyObject *args)
{
    PyObject *text, *starts, *ends;
    Py_buffer views[3] = {{0}};
    long long start, stop, count;
    const char *white;
    Py_ssize_t comment_bytes, white_bytes;
    Lines lines = {0};
    int ok = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "OLLOOLpy#y#:index", &text, &start, &stop, &starts, &ends, &count,
                          &lines.skip_blank, &lines.comment, &comment_bytes, &white, &white_bytes))
        return NULL;
    if (!get_bytes(text, &views[0], "text", 1, 0) ||
        !get_int64(starts, &views[1], "starts", -1, 1) ||
        !get_int64(ends, &views[2], "ends", views[1].len / 8, 1))
        goto done;
    lines.bytes = views[0].buf;
    lines.at = start;
    lines.stop = stop;
    lines.starts = views[1].buf;
    lines.ends = views[2].buf;
    lines.count = count;
    lines.room = views[1].len / 8;
    lines.comment_bytes = (size_t)comment_bytes;
    if (comment_bytes == 0)
        lines.comment = NULL;
    for (Py_ssize_t i = 0; i < white_bytes; i++)
        lines.white[(uint8_t)white[i]] = 1;
    Py_BEGIN_ALLOW_THREADS
    lines_index(&lines);
    Py_END_ALLOW_THREADS
    ok = 1;
done:
    release(views, 3);
    return ok ? Py_BuildValue("LL", (long long)lines.count, (long long)lines.at) : NULL;
}

/* ---- byte ranges of a file ---- */

/* NULL with an exception set, None, or (row, byte) where the file ends early. */
static PyObject *read_result(const Reading *reading, int result, int error)
{
    switch (result) {
    case READ_DONE:
        Py_RETURN_NONE;
    case READ_ENDED:
        return Py_BuildValue("LL", (long long)reading->row, (long long)reading->at);
    case READ_OUTSIDE:
        return PyErr_Format(PyExc_ValueError,
                            "row %lld: its bytes or its place in out are out of range",
                            (long long)reading->row);
    case READ_FAILED:
        errno = error;
        return PyErr_SetFromErrno(PyExc_OSError);
    default: /* interrupted, and a signal handler raised */
        return NULL;
    }
}

/* Read the bytes `starts[i]` to `ends[i]` of a file into `out` at `places[i]`. Returns None, or
   (row, byte) of the first byte that the file lacks. */
static PyObject *read_(PyObject *module, PyObject *args)
{
    PyObject *starts, *ends, *out, *places, *answer = NULL;
    Py_buffer views[4] = {{0}};
    Reading reading = {0};
    int result, error = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "iOOOO:read", &reading.fd, &starts, &ends, &out, &places))
        return NULL;
    if (!get_int64(starts, &views[0], "starts", -1, 0) ||
        !get_int64(ends, &views[1], "ends", views[0].len / 8, 0) ||
        !get_int64(places, &views[2], "places", views[0].len / 8, 0) ||
        !get_bytes(out, &views[3], "out", 1, 1))
        goto done;
    reading.starts = views[0].buf;
    reading.ends = views[1].buf;
    reading.places = views[2].buf;
    reading.out = views[3].buf;
    reading.out_bytes = views[3].len;
    reading.rows = views[0].len / 8;
    reading.row = rows_inside(&reading);
    if (reading.row < reading.rows) {
        answer = read_result(&reading, READ_OUTSIDE, 0);
        goto done;
    }
    reading.row = 0;
    do {
        Py_BEGIN_ALLOW_THREADS
        result = rows_read(&reading);
        error = errno;
        Py_END_ALLOW_THREADS
    } while (result == READ_INTERRUPTED && PyErr_CheckSignals() == 0);
    answer = read_result(&reading, result, error);
done:
    release(views, 4);
    return answer;
}

/* ---- rows to columns and back ---- */

/* Columns as given: (byte offset in a row, bytes, buffer of `rows` times that many bytes). */
typedef struct {
    Py_ssize_t count;
    Py_buffer *views;
    Piece *pieces; /* with `from` or `to` still NULL on the side of the row */
    int64_t *offsets;
} Columns;

static void free_columns(Columns *columns)
{
    if (columns->views != NULL)
        release(columns->views, columns->count);
    PyMem_Free(columns->views);
    PyMem_Free(columns->pieces);
    PyMem_Free(columns->offsets);
}

static int get_column(Columns *columns, Py_ssize_t i, PyObject *item, int64_t rows,
                      int64_t row_bytes, int is_written)
{
    Py_buffer *view = &columns->views[i];
    long long offset, width;
    PyObject *array;
    if (!PyArg_ParseTuple(item, "LLO:column", &offset, &width, &array) ||
        !get_buffer(array, view, "column", is_written))
        return 0;
    if (has_objects(view)) {
        PyErr_SetString(PyExc_ValueError, "a column holds Python objects, not plain bytes");
        return 0;
    }
    if (offset < 0 || width < 0 || offset > row_bytes || width > row_bytes - offset) {
        PyErr_Format(PyExc_ValueError, "column %zd: %lld bytes at %lld are not in a row of %lld", i,
                     width, offset, (long long)row_bytes);
        return 0;
    }
    int64_t found = view->ndim > 0 ? view->shape[0] : -1;
    if (found != rows || (rows > 0 && (view->len % rows != 0 || view->len / rows != width))) {
        PyErr_Format(PyExc_ValueError,
                     "column %zd: expected %lld rows of %lld bytes, found %lld, %zd bytes in all",
                     i, (long long)rows, width, (long long)found, view->len);
        return 0;
    }
    columns->offsets[i] = offset;
    columns->pieces[i].width = width;
    return 1;
}

static int get_columns(Columns *columns, PyObject *given, int64_t rows, int64_t row_bytes,
                       int is_written)
{
    PyObject *items = PySequence_Tuple(given);
    if (items == NULL)
        return 0;
    columns->count = PyTuple_Size(items);
    size_t room = (size_t)columns->count + 1;
    columns->views = PyMem_Calloc(room, sizeof(Py_buffer));
    columns->pieces = PyMem_Calloc(room, sizeof(Piece));
    columns->offsets = PyMem_Calloc(room, sizeof(int64_t));
    int ok = columns->views != NULL && columns->pieces != NULL && columns->offsets != NULL;
    if (!ok)
        PyErr_NoMemory();
    for (Py_ssize_t i = 0; ok && i < columns->count; i++)
        ok = get_column(columns, i, PyTuple_GetItem(items, i), rows, row_bytes, is_written);
    Py_DECREF(items);
    return ok;
}

static int check_index(const Py_buffer *view, int64_t rows)
{
    const int64_t *index = view->buf;
    for (Py_ssize_t i = 0; i < view->len / 8; i++) {
        if (index[i] < 0 || index[i] >= rows) {
            PyErr_Format(PyExc_IndexError, "index[%zd] is %lld, but there are %lld rows", i,
                         (long long)index[i], (long long)rows);
            return 0;
        }
    }
    return 1;
}

static PyObject *move(const Columns *columns, const int64_t *index, int64_t count)
{
    Py_BEGIN_ALLOW_THREADS
    rows_move(columns->pieces, columns->count, index, count);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

/* Copy bytes of the rows `index` (int64) of `source` (bytes in two dimensions) into each of the
   columns: (byte offset in the row, bytes, array). */
static PyObject *split(PyObject *module, PyObject *args)
{
    PyObject *source, *index, *given, *answer = NULL;
    Py_buffer views[2] = {{0}};
    Columns columns = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOO:split", &source, &index, &given))
        return NULL;
    if (!get_bytes(source, &views[0], "source", 2, 0) ||
        !get_int64(index, &views[1], "index", -1, 0))
        goto done;
    int64_t rows = views[0].shape[0], row_bytes = views[0].shape[1], count = views[1].len / 8;
    if (!check_index(&views[1], rows) ||
        !get_columns(&columns, given, count, row_bytes, 1))
        goto done;
    for (Py_ssize_t i = 0; i < columns.count; i++) {
        Piece *piece = &columns.pieces[i];
        piece->from = (const uint8_t *)views[0].buf + columns.offsets[i];
        piece->from_step = row_bytes;
        piece->to = columns.views[i].buf;
        piece->to_step = piece->width;
    }
    answer = move(&columns, views[1].buf, count);
done:
    free_columns(&columns);
    release(views, 2);
    return answer;
}

/* Copy each column (byte offset in the row, bytes, array of `rows` rows) into the rows of `out`
   (bytes in two dimensions): the rows `index` (int64), or all in their order where it is None. */
static PyObject *join(PyObject *module, PyObject *args)
{
    PyObject *given, *out, *index, *answer = NULL;
    Py_buffer views[2] = {{0}};
    Columns columns = {0};
    long long rows;
    (void)module;
    if (!PyArg_ParseTuple(args, "OLOO:join", &given, &rows, &out, &index))
        return NULL;
    if (!get_bytes(out, &views[0], "out", 2, 1))
        goto done;
    int64_t count = views[0].shape[0], row_bytes = views[0].shape[1];
    if (!get_columns(&columns, given, rows, row_bytes, 0))
        goto done;
    if (index == Py_None && count != rows) {
        PyErr_Format(PyExc_ValueError, "out: expected %lld rows, found %lld", rows,
                     (long long)count);
        goto done;
    }
    if (index != Py_None &&
        (!get_int64(index, &views[1], "index", count, 0) || !check_index(&views[1], rows)))
        goto done;
    for (Py_ssize_t i = 0; i < columns.count; i++) {
        Piece *piece = &columns.pieces[i];
        piece->from = columns.views[i].buf;
        piece->from_step = piece->width;
        piece->to = (uint8_t *)views[0].buf + columns.offsets[i];
        piece->to_step = row_bytes;
    }
    answer = move(&columns, index != Py_None ? views[1].buf : NULL, count);
done:
    free_columns(&columns);
    release(views, 2);
    return answer;
}

static PyMethodDef methods[] = {
    {"index", index_, METH_VARARGS, NULL},
    {"read", read_, METH_VARARGS, NULL},
    {"split", split, METH_VARARGS, NULL},
    {"join", join, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

MODULE(_lines, "Lines of a text, byte ranges of a file, and rows of bytes to and from columns.", methods)
