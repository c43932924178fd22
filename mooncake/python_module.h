// Functions of C++ as those of a Python module: a call takes a tenth of the time that one through ctypes does. What is used
// of Python is in its stable ABI and declared here: no headers of it are needed. A function that has failed leaves a Python
// exception; the interpreter's lock is held, but for what a function does under an `Unlocked`.

#pragma once

#include <cstdint>
#include <sys/types.h>
#include <tuple>
#include <type_traits>
#include <utility>

extern "C" {
struct PyObject {
    void *opaque;  // never looked into
};
struct PyMethodDef {
    const char *name;
    PyObject *(*call)(PyObject *, PyObject *const *, ssize_t);
    int flags;
    const char *doc;
};
struct Py_buffer {
    void *data;
    PyObject *owner;
    ssize_t size, item_size;
    int is_read_only, dimensions;
    char *format;
    ssize_t *shape, *strides, *suboffsets;
    void *internal;
};
extern PyObject _Py_NoneStruct;
extern PyObject *PyExc_TypeError, *PyExc_ValueError;
PyObject *PyModule_New(const char *name);
int PyModule_AddFunctions(PyObject *module, PyMethodDef *functions);
PyObject *Py_BuildValue(const char *format, ...);
PyObject *PyBytes_FromStringAndSize(const char *data, ssize_t size);
int PyBytes_AsStringAndSize(PyObject *bytes, char **data, ssize_t *size);
PyObject *PyLong_FromLongLong(long long value);
long long PyLong_AsLongLong(PyObject *object);
PyObject *PyLong_FromVoidPtr(void *pointer);
void *PyLong_AsVoidPtr(PyObject *object);
PyObject *PyFloat_FromDouble(double value);
double PyFloat_AsDouble(PyObject *object);
int PyObject_GetBuffer(PyObject *object, Py_buffer *buffer, int flags);
void PyBuffer_Release(Py_buffer *buffer);
PyObject *PyTuple_New(ssize_t size);
int PyTuple_SetItem(PyObject *tuple, ssize_t at, PyObject *item);
ssize_t PySequence_Size(PyObject *sequence);
PyObject *PySequence_GetItem(PyObject *sequence, ssize_t at);
int PyObject_IsTrue(PyObject *object);
PyObject *PyBool_FromLong(long value);
PyObject *PyErr_Occurred();
void PyErr_SetString(PyObject *type, const char *message);
void PyErr_Clear();
struct PyThreadState *PyEval_SaveThread();
void PyEval_RestoreThread(struct PyThreadState *);
void Py_DecRef(PyObject *object);
}

namespace python {

// The elements of an array or of bytes that the caller keeps for as long as the function runs; of None there are none.
template <typename T> struct Array {
    T *data = nullptr;
    int64_t size = 0;
};

template <typename T> struct Argument {  // an integer
    static T of(PyObject *object) { return PyLong_AsLongLong(object); }
};
template <> struct Argument<double> {
    static double of(PyObject *object) { return PyFloat_AsDouble(object); }
};
template <> struct Argument<PyObject *> {
    static PyObject *of(PyObject *object) { return object; }
};
template <typename T> struct Argument<T *> {  // something of ours: Python has it as a number
    static T *of(PyObject *object) { return static_cast<T *>(PyLong_AsVoidPtr(object)); }
};
template <typename T> struct Argument<Array<T>> {
    static Array<T> of(PyObject *object) {
        constexpr int kWritable = 1;
        if (object == &_Py_NoneStruct) return {};
        Py_buffer buffer;
        if (PyObject_GetBuffer(object, &buffer, std::is_const_v<T> ? 0 : kWritable)) return {};
        const Array<T> found{static_cast<T *>(buffer.data), buffer.size / ssize_t(sizeof(T))};
        PyBuffer_Release(&buffer);
        return found;
    }
};

// Lets other threads of Python run, when it is worth that. Nothing of Python may be touched meanwhile.
class Unlocked {
  public:
    explicit Unlocked(bool is_worth_it) : state(is_worth_it ? PyEval_SaveThread() : nullptr) {}
    ~Unlocked() {
        if (state) PyEval_RestoreThread(state);
    }
    Unlocked(const Unlocked &) = delete;

  private:
    PyThreadState *state;
};

inline PyObject *none() { return Py_BuildValue(""); }
inline PyObject *to_object(PyObject *object) { return object; }
inline PyObject *to_object(double value) { return PyFloat_FromDouble(value); }
inline PyObject *to_object(int64_t value) { return PyLong_FromLongLong(value); }
template <typename T> PyObject *to_object(T *ours) { return PyLong_FromVoidPtr(ours); }

template <auto function> struct Call;
template <typename Result, typename... Arguments, Result (*function)(Arguments...)> struct Call<function> {
    static PyObject *call(PyObject *, PyObject *const *given, ssize_t count) {
        if (count == sizeof...(Arguments)) return call(given, std::index_sequence_for<Arguments...>());
        PyErr_SetString(PyExc_TypeError, "wrong number of arguments");
        return nullptr;
    }

  private:
    template <size_t... at> static PyObject *call(PyObject *const *given, std::index_sequence<at...>) {
        const std::tuple<Arguments...> arguments{Argument<Arguments>::of(given[at])...};
        if (PyErr_Occurred()) return nullptr;
        if constexpr (std::is_void_v<Result>) {
            std::apply(function, arguments);
            return PyErr_Occurred() ? nullptr : none();
        } else {
            const Result result = std::apply(function, arguments);
            return PyErr_Occurred() ? nullptr : to_object(result);
        }
    }
};

template <auto function> constexpr PyMethodDef method(const char *name) {
    constexpr int kFastCall = 0x80;
    return {name, Call<function>::call, kFastCall, nullptr};
}

}  // namespace python

// The module's functions, by their names.
#define PYTHON_MODULE(name, ...)                                        \
    extern "C" PyObject *python_module() {                              \
        static PyMethodDef methods[] = {__VA_ARGS__, {}};               \
        PyObject *module = PyModule_New(name);                          \
        if (module) PyModule_AddFunctions(module, methods);             \
        return module;                                                  \
    }
