/* The frame of every extension here. */

#ifndef FLATOUT_MODULE_H
#define FLATOUT_MODULE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#ifdef Py_GIL_DISABLED
#define NEEDS_NO_GIL {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#else
#define NEEDS_NO_GIL
#endif

/* The module NAME. Behind its methods, which may be NULL, come slots that it has in addition. */
#define MODULE(NAME, DOC, METHODS, ...)                                                            \
    static PyModuleDef_Slot slots[] = {__VA_ARGS__ NEEDS_NO_GIL{0, NULL}};                         \
    static struct PyModuleDef definition = {                                                       \
        PyModuleDef_HEAD_INIT,                                                                     \
        .m_name = #NAME,                                                                           \
        .m_doc = DOC,                                                                              \
        .m_methods = METHODS,                                                                      \
        .m_slots = slots,                                                                          \
    };                                                                                             \
    PyMODINIT_FUNC PyInit_##NAME(void)                                                             \
    {                                                                                              \
        return PyModuleDef_Init(&definition);                                                      \
    }

#endif
