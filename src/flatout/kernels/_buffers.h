/* Checks of the buffers that come in: a wrong one is a ValueError, never a crash. */

#ifndef FLATOUT_BUFFERS_H
#define FLATOUT_BUFFERS_H

#include "_module.h"

/* Take hold of C-contiguous memory; 0 with an exception set. */
static inline int get_buffer(PyObject *object, Py_buffer *view, const char *name, int is_written)
{
    int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (is_written ? PyBUF_WRITABLE : 0);
    if (PyObject_GetBuffer(object, view, flags) == 0)
        return 1;
    /* numpy says ValueError and the standard library BufferError for the same thing. */
    if (PyErr_ExceptionMatches(PyExc_BufferError) || PyErr_ExceptionMatches(PyExc_ValueError)) {
        PyErr_Clear();
        PyErr_Format(PyExc_ValueError, "%s: expected C-contiguous memory%s", name,
                     is_written ? " that can be written" : "");
    }
    return 0;
}

static inline void release(Py_buffer *views, Py_ssize_t count)
{
    for (Py_ssize_t i = 0; i < count; i++)
        PyBuffer_Release(&views[i]);
}

/* What native, aligned numbers a buffer holds, as numpy calls them; "" for anything else. No format
   at all means bytes. */
static inline const char *dtype(const Py_buffer *view)
{
    const char *format = view->format == NULL ? "B" : view->format;
    if (*format == '@' || *format == '=')
        format++;
    char kind = format[0] != 0 && format[1] == 0 ? format[0] : 0;
    int is_integer = kind == 'i' || kind == 'l' || kind == 'q';
    if ((uintptr_t)view->buf % (size_t)(view->itemsize > 0 ? view->itemsize : 1) != 0)
        return "";
    switch (view->itemsize) {
    case 1:
        return kind == 'B' ? "uint8" : "";
    case 4:
        return kind == 'f' ? "float32" : is_integer ? "int32" : "";
    case 8:
        return kind == 'd' ? "float64" : is_integer ? "int64" : "";
    default:
        return "";
    }
}

static inline int holds(const Py_buffer *view, const char *wanted)
{
    return strcmp(dtype(view), wanted) == 0;
}

static inline int overlap(const Py_buffer *a, const Py_buffer *b)
{
    uintptr_t a0 = (uintptr_t)a->buf, b0 = (uintptr_t)b->buf;
    return a->len > 0 && b->len > 0 && a0 < b0 + (uintptr_t)b->len && b0 < a0 + (uintptr_t)a->len;
}

/* Whether no view from `written` on shares memory with one before it. */
static inline int are_apart(const Py_buffer *views, const char *const *names, int written, int count)
{
    for (; written < count; written++) {
        for (int other = 0; other < written; other++) {
            if (overlap(&views[written], &views[other])) {
                PyErr_Format(PyExc_ValueError, "%s shares memory with %s", names[written],
                             names[other]);
                return 0;
            }
        }
    }
    return 1;
}

#endif
