/* Images cut out, mirrored and turned in one copy, and their colors changed in place.

   Everything that comes in is checked here, whatever the caller checked before: a wrong buffer is a
   ValueError, never a crash. */

#include "_buffers.h"
#ifdef __x86_64__
#include <immintrin.h>
#endif

/* -- arrange: a part of an image in one of eight orientations --------------------------------- */

enum { MIRRORED = 4, TURNS = 3, ORIENTATIONS = 8 };

typedef struct {
    const uint8_t *source;
    uint8_t *out;
    int64_t source_height, source_width, height, width, pixel; /* bytes of a pixel */
} Images;

/* Pixels in a row of the result, from pixels of the source that are `step` bytes apart. */
static inline void copy_pixels(uint8_t *restrict out, const uint8_t *source, int64_t step,
                               int64_t count, int64_t pixel)
{
    for (int64_t i = 0; i < count; i++, out += pixel, source += step)
        for (int64_t k = 0; k < pixel; k++)
            out[k] = source[k];
}

#ifdef __x86_64__
/* Five pixels of three bytes at a time, last first. Writes and reads stay within the row. */
__attribute__((target("ssse3"))) static void mirror_3(uint8_t *restrict out, const uint8_t *last,
                                                      int64_t count)
{
    const __m128i picks = _mm_setr_epi8(13, 14, 15, 10, 11, 12, 7, 8, 9, 4, 5, 6, 1, 2, 3, -1);
    int64_t i = 0;
    for (; i + 6 <= count; i += 5) {
        __m128i five = _mm_loadu_si128((const __m128i *)(last + 3 - 16 - 3 * i));
        _mm_storeu_si128((__m128i *)(out + 3 * i), _mm_shuffle_epi8(five, picks));
    }
    copy_pixels(out + 3 * i, last - 3 * i, -3, count - i, 3);
}
#endif

static void copy_row(uint8_t *out, const uint8_t *source, int64_t step, int64_t count,
                     int64_t pixel)
{
    if (step == pixel)
        memcpy(out, source, (size_t)(count * pixel));
#ifdef __x86_64__
    else if (step == -3 && pixel == 3 && __builtin_cpu_supports("ssse3"))
        mirror_3(out, source, count);
#endif
    else if (pixel == 3)
        copy_pixels(out, source, step, count, 3);
    else if (pixel == 1)
        copy_pixels(out, source, step, count, 1);
    else if (pixel == 4)
        copy_pixels(out, source, step, count, 4);
    else if (pixel == 12)
        copy_pixels(out, source, step, count, 12);
    else
        copy_pixels(out, source, step, count, pixel);
}

/* One image. A row of the result is a row or a column of the source, in either direction; what lies
   outside the source is 0. */
static void arrange_image(const Images *im, const uint8_t *source, uint8_t *out, int64_t top,
                          int64_t left, int64_t orientation)
{
    const int64_t turns = orientation & TURNS, mirrored = (orientation & MIRRORED) != 0;
    const int64_t along_rows = turns % 2 == 0, line = im->width * im->pixel;
    const int64_t side = along_rows ? im->width : im->height;
    for (int64_t i = 0; i < im->height; i++, out += line) {
        /* The place of the row's pixel j within the part: fixed in one direction, and in the other
           one j or, backwards, side - 1 - j. */
        int64_t fixed = (turns == 1 || turns == 2) ? im->height - 1 - i : i;
        int64_t backwards = along_rows ? (turns == 2) != mirrored : turns == 3;
        if (!along_rows && mirrored)
            fixed = im->height - 1 - fixed;
        const int64_t row = along_rows ? top + fixed : top, column = along_rows ? left : left + fixed;
        const int64_t begin = along_rows ? left : top;
        const int64_t length = along_rows ? im->source_width : im->source_height;
        const int64_t place = along_rows ? row : column;
        const int64_t places = along_rows ? im->source_height : im->source_width;
        /* Of the part's pixels in this direction, those that the source has. */
        int64_t first = begin < 0 ? -begin : 0, stop = length - begin < side ? length - begin : side;
        if (place < 0 || place >= places || first >= stop) {
            memset(out, 0, (size_t)line);
            continue;
        }
        const int64_t distance = (along_rows ? 1 : im->source_width) * im->pixel;
        const int64_t from = backwards ? side - stop : first, until = from + stop - first;
        const int64_t at = begin + (backwards ? stop - 1 : first);
        const uint8_t *pixel = source + (along_rows ? row * im->source_width + at
                                                    : at * im->source_width + column) * im->pixel;
        memset(out, 0, (size_t)(from * im->pixel));
        copy_row(out + from * im->pixel, pixel, backwards ? -distance : distance, stop - first,
                 im->pixel);
        memset(out + until * im->pixel, 0, (size_t)((side - until) * im->pixel));
    }
}

static int check_arrange(const Py_buffer *views, Images *im)
{
    const Py_buffer *source = &views[0], *out = &views[1], *places = &views[2];
    if (!holds(source, "uint8") || !holds(out, "uint8") || source->ndim != 4 || out->ndim != 4 ||
        source->len == 0 || out->len == 0 || source->shape[0] != out->shape[0] ||
        source->shape[3] != out->shape[3]) {
        PyErr_SetString(PyExc_ValueError, "source and out: expected uint8 of shape (rows, height, "
                                          "width, bytes), with the same rows and bytes, not 0");
        return 0;
    }
    if (!holds(places, "int64") || places->ndim != 2 || places->shape[0] != source->shape[0] ||
        places->shape[1] != 3) {
        PyErr_SetString(PyExc_ValueError, "places: expected int64 of shape (rows, 3)");
        return 0;
    }
    if (overlap(source, out)) {
        PyErr_SetString(PyExc_ValueError, "out shares memory with source");
        return 0;
    }
    *im = (Images){source->buf, out->buf, source->shape[1], source->shape[2],
                   out->shape[1], out->shape[2], source->shape[3]};
    const int64_t *place = places->buf;
    for (Py_ssize_t i = 0; i < places->shape[0]; i++, place += 3) {
        const int64_t most = INT32_MAX;
        if (place[0] < -most || place[0] > most || place[1] < -most || place[1] > most ||
            place[2] < 0 || place[2] >= ORIENTATIONS) {
            PyErr_SetString(PyExc_ValueError, "places: expected places within 2^31 and an "
                                              "orientation from 0 to 7");
            return 0;
        }
        if (place[2] % 2 && im->height != im->width) {
            PyErr_SetString(PyExc_ValueError, "places: only squares can be turned by a quarter");
            return 0;
        }
    }
    return 1;
}

PyDoc_STRVAR(arrange_doc,
"arrange(source, out, places)\n--\n\n"
"Copy a part of each image into `out`. `places` has a row for each image: top, left, orientation.");

static PyObject *arrange(PyObject *module, PyObject *args)
{
    static const char *const names[] = {"source", "out", "places"};
    PyObject *objects[3];
    Py_buffer views[3];
    Images im;
    int taken = 0, done = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOO:arrange", &objects[0], &objects[1], &objects[2]))
        return NULL;
    while (taken < 3 && get_buffer(objects[taken], &views[taken], names[taken], taken == 1))
        taken++;
    if (taken == 3 && check_arrange(views, &im)) {
        const int64_t *place = views[2].buf;
        const int64_t rows = views[0].shape[0];
        Py_BEGIN_ALLOW_THREADS
        for (int64_t i = 0; i < rows; i++, place += 3)
            arrange_image(&im, im.source + i * im.source_height * im.source_width * im.pixel,
                          im.out + i * im.height * im.width * im.pixel, place[0], place[1],
                          place[2]);
        Py_END_ALLOW_THREADS
        done = 1;
    }
    release(views, taken);
    if (!done)
        return NULL;
    Py_RETURN_NONE;
}

/* -- adjust: brightness, contrast and saturation ---------------------------------------------- */

/* Factors are 65536ths, and results are cut, not rounded, as torchvision's are. */
enum { ONE = 65536, RED = 19589, GREEN = 38470, BLUE = 7471, MOST = 100 * ONE };

static inline uint8_t as_byte(int32_t value)
{
    value >>= 16;
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

static inline int32_t gray_of(const uint8_t *p)
{
    return (p[0] * RED + p[1] * GREEN + p[2] * BLUE) >> 16;
}

static inline void scale_body(uint8_t *pixels, int64_t count, int32_t factor, int32_t shift)
{
    for (int64_t i = 0; i < count; i++)
        pixels[i] = as_byte(pixels[i] * factor + shift);
}

static inline int64_t gray_body(const uint8_t *pixels, int64_t count, int64_t channels)
{
    int64_t sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum += channels == 3 ? gray_of(pixels + 3 * i) : pixels[i];
    return sum;
}

static inline void saturate_body(uint8_t *pixels, int64_t count, int32_t factor)
{
    for (int64_t i = 0; i < count; i++, pixels += 3) {
        int32_t gray = gray_of(pixels) * (ONE - factor);
        for (int k = 0; k < 3; k++)
            pixels[k] = as_byte(pixels[k] * factor + gray);
    }
}

static inline void adjust_body(uint8_t *pixels, int64_t count, int64_t channels,
                               const int64_t *factors)
{
    if (factors[0] != ONE)
        scale_body(pixels, count * channels, (int32_t)factors[0], 0);
    if (factors[1] != ONE) {
        /* The mean, in 65536ths, rounded. */
        int64_t mean = (gray_body(pixels, count, channels) * ONE + count / 2) / count;
        scale_body(pixels, count * channels, (int32_t)factors[1],
                   (int32_t)(((ONE - factors[1]) * mean) >> 16));
    }
    if (factors[2] != ONE)
        saturate_body(pixels, count, (int32_t)factors[2]);
}

typedef void Adjust(uint8_t *pixels, int64_t count, int64_t channels, const int64_t *factors);

static void adjust_plain(uint8_t *pixels, int64_t count, int64_t channels, const int64_t *factors)
{
    adjust_body(pixels, count, channels, factors);
}

#ifdef __x86_64__
__attribute__((target("avx2"))) static void adjust_avx2(uint8_t *pixels, int64_t count,
                                                        int64_t channels, const int64_t *factors)
{
    adjust_body(pixels, count, channels, factors);
}
#endif

static int check_adjust(const Py_buffer *pixels, const Py_buffer *factors)
{
    if (!holds(pixels, "uint8") || pixels->ndim != 4 || pixels->len == 0 ||
        (pixels->shape[3] != 1 && pixels->shape[3] != 3)) {
        PyErr_SetString(PyExc_ValueError,
                        "pixels: expected uint8 of shape (rows, height, width, 1 or 3), not 0");
        return 0;
    }
    if (!holds(factors, "int64") || factors->ndim != 2 || factors->shape[0] != pixels->shape[0] ||
        factors->shape[1] != 3) {
        PyErr_SetString(PyExc_ValueError, "factors: expected int64 of shape (rows, 3)");
        return 0;
    }
    const int64_t *factor = factors->buf;
    for (Py_ssize_t i = 0; i < 3 * factors->shape[0]; i++)
        if (factor[i] < 0 || factor[i] > MOST ||
            (i % 3 == 2 && pixels->shape[3] == 1 && factor[i] != ONE)) {
            PyErr_SetString(PyExc_ValueError, "factors: expected 65536ths from 0 to 100, and gray "
                                              "images saturated by 1");
            return 0;
        }
    return 1;
}

PyDoc_STRVAR(adjust_doc,
"adjust(pixels, factors)\n--\n\n"
"Change the colors of images in place. `factors` has a row for each: brightness, contrast and\n"
"saturation, in 65536ths.");

static PyObject *adjust(PyObject *module, PyObject *args)
{
    static const char *const names[] = {"pixels", "factors"};
    PyObject *objects[2];
    Py_buffer views[2];
    int taken = 0, done = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO:adjust", &objects[0], &objects[1]))
        return NULL;
    while (taken < 2 && get_buffer(objects[taken], &views[taken], names[taken], taken == 0))
        taken++;
    if (taken == 2 && check_adjust(&views[0], &views[1])) {
        const int64_t *factors = views[1].buf;
        const int64_t rows = views[0].shape[0], channels = views[0].shape[3];
        const int64_t count = views[0].shape[1] * views[0].shape[2];
        Adjust *adjust_image = adjust_plain;
#ifdef __x86_64__
        if (__builtin_cpu_supports("avx2"))
            adjust_image = adjust_avx2;
#endif
        Py_BEGIN_ALLOW_THREADS
        for (int64_t i = 0; i < rows; i++)
            adjust_image((uint8_t *)views[0].buf + i * count * channels, count, channels,
                         factors + 3 * i);
        Py_END_ALLOW_THREADS
        done = 1;
    }
    release(views, taken);
    if (!done)
        return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"arrange", arrange, METH_VARARGS, arrange_doc},
    {"adjust", adjust, METH_VARARGS, adjust_doc},
    {NULL, NULL, 0, NULL},
};

MODULE(_augment, "Images cut out, mirrored and turned; and their colors changed.", methods)
