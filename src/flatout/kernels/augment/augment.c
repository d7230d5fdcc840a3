/* What augmentation does to images: a part of each is resized, or cut out, mirrored and turned; its
   colors are changed, and a box of it made black. An image is done with before the next one begins,
   so that it stays in the cache.

   Everything that comes in is checked here, whatever the caller checked before: a wrong buffer is a
   ValueError, never a crash. Numbers are copied before they are looked at, since another thread may
   write into them. */

#include "arrange.h"
#include "color.h"
#include "resample.h"
#include "../shared/buffers.h"

static const Colors plain_colors = {scale, sum_grays, saturate};

#ifdef __x86_64__
/* Bytes that are `apart` from one another, 16 in each lane. */
AVX2 static inline __m256i load_lanes(const uint8_t *p, int64_t apart)
{
    __m256i low = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)p));
    return _mm256_inserti128_si256(low, _mm_loadu_si128((const __m128i *)(p + apart)), 1);
}

AVX2 static inline void store_lanes(uint8_t *p, int64_t apart, __m256i v)
{
    _mm_storeu_si128((__m128i *)p, _mm256_castsi256_si128(v));
    _mm_storeu_si128((__m128i *)(p + apart), _mm256_extracti128_si256(v, 1));
}

AVX2 static inline __m256i load_32(const void *p)
{
    return _mm256_loadu_si256((const __m256i *)p);
}

AVX2 static inline void store_32(void *p, __m256i v)
{
    _mm256_storeu_si256((__m256i *)p, v);
}

AVX2 static inline __m256i spread_16(const void *p)
{
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p));
}

#include "wide.h"

static const Downs downs_avx2 = {32, between_avx2, down_avx2};
#endif

/* Bytes of the widest vectors that this processor has and the caller lets be used. */
static int usable(int most)
{
    int width = 0;
#ifdef __x86_64__
    if (__builtin_cpu_supports("avx2"))
        width = 32;
    else if (__builtin_cpu_supports("ssse3"))
        width = 16;
#endif
    return width < most ? width : most;
}

static const Colors *colors_of(int vectors)
{
#ifdef __x86_64__
    if (vectors >= 32)
        return &colors_avx2;
#endif
    (void)vectors;
    return &plain_colors;
}

static const Downs *downs_of(int vectors)
{
#ifdef __x86_64__
    if (vectors >= 32)
        return &downs_avx2;
#endif
    (void)vectors;
    return &plain_downs;
}

/* -- a batch ---------------------------------------------------------------------------------- */

enum { SOURCE, OUT, INDEX, PLACES, PARTS, FACTORS, BOXES, VIEWS };

static const char *const names[VIEWS] = {"source", "out",     "index", "places",
                                         "parts",  "factors", "boxes"};
static const int columns[VIEWS] = {0, 0, 1, 3, 4, 3, 4};

/* What becomes of an image. */
typedef struct {
    int64_t row, place[3], part[4], factors[3], box[4];
} Change;

typedef struct {
    const uint8_t *source, *end; /* up to where it may be read */
    uint8_t *out;
    int64_t pitch; /* bytes from one image of the source to the next */
    Sizes sizes;
    int64_t rows, count; /* images of the source, and of the result */
    int has_parts, has_factors, has_boxes, vectors;
    Change *changes;
} Batch;

static int wrong(const char *words)
{
    PyErr_SetString(PyExc_ValueError, words);
    return 0;
}

static int check_images(Batch *b, const Py_buffer *source, const Py_buffer *out)
{
    if (!holds(source, "uint8") || !holds(out, "uint8") || source->ndim != 4 || out->ndim != 4 ||
        source->len == 0 || out->len == 0 || source->shape[3] != out->shape[3])
        return wrong("source and out: expected uint8 of shape (rows, height, width, bytes), with "
                     "the same bytes, not 0");
    const Py_ssize_t *strides = source->strides, *shape = source->shape;
    const Py_ssize_t line = shape[2] * shape[3], all = line * shape[1];
    /* The stride of a dimension of length 1 means nothing. */
    if ((shape[3] > 1 && strides[3] != 1) || (shape[2] > 1 && strides[2] != shape[3]) ||
        (shape[1] > 1 && strides[1] != line) || (shape[0] > 1 && strides[0] < all))
        return wrong("source: expected images that are C-contiguous each, one behind the other");
    for (int i = 1; i < 3; i++)
        if (source->shape[i] > INT32_MAX || out->shape[i] > INT32_MAX)
            return wrong("source and out: expected sides below 2^31");
    b->source = source->buf;
    b->pitch = shape[0] > 1 ? strides[0] : all;
    b->end = b->source + (shape[0] - 1) * b->pitch + all;
    b->out = out->buf;
    b->rows = source->shape[0];
    b->count = out->shape[0];
    b->sizes = (Sizes){source->shape[1], source->shape[2], out->shape[1], out->shape[2],
                       source->shape[3]};
    return 1;
}

static int check_numbers(const Py_buffer *view, int kind, Py_ssize_t count)
{
    const int has_columns = kind != INDEX;
    if (!holds(view, "int64") || view->ndim != 1 + has_columns || view->shape[0] != count ||
        (has_columns && view->shape[1] != columns[kind])) {
        if (has_columns)
            PyErr_Format(PyExc_ValueError, "%s: expected int64 of shape (rows, %d)", names[kind],
                         columns[kind]);
        else
            PyErr_Format(PyExc_ValueError, "%s: expected int64 of shape (rows,)", names[kind]);
        return 0;
    }
    return 1;
}

static int is_within(int64_t value, int64_t least, int64_t most)
{
    return value >= least && value <= most;
}

static int check_change(const Batch *b, const Change *c)
{
    const Sizes *s = &b->sizes;
    if (!is_within(c->row, 0, b->rows - 1)) {
        PyErr_Format(PyExc_IndexError, "index: %lld, but the source has %lld rows",
                     (long long)c->row, (long long)b->rows);
        return 0;
    }
    for (int k = 0; k < 2; k++)
        if (!is_within(c->place[k], -INT32_MAX, INT32_MAX))
            return wrong("places: expected places within 2^31");
    if (!is_within(c->place[2], 0, ORIENTATIONS - 1))
        return wrong("places: expected an orientation from 0 to 7");
    if (c->place[2] % 2 && s->out_height != s->out_width)
        return wrong("places: only squares can be turned by a quarter");
    if (b->has_parts &&
        (!is_within(c->part[0], 0, s->height - 1) || !is_within(c->part[1], 0, s->width - 1) ||
         !is_within(c->part[2], 1, s->height - c->part[0]) ||
         !is_within(c->part[3], 1, s->width - c->part[1])))
        return wrong("parts: expected parts within the images");
    for (int k = 0; b->has_factors && k < 3; k++)
        if (!is_within(c->factors[k], 0, MOST) || (k == 2 && s->pixel == 1 && c->factors[k] != ONE))
            return wrong("factors: expected 65536ths from 0 to 100, and gray images saturated by 1");
    return 1;
}

static void copy_numbers(int64_t *to, const Py_buffer *view, Py_ssize_t row, int kind)
{
    memcpy(to, (const int64_t *)view->buf + row * columns[kind],
           (size_t)columns[kind] * sizeof *to);
}

/* 0 with an exception set. */
static int check(Batch *b, const Py_buffer *views)
{
    if (!check_images(b, &views[SOURCE], &views[OUT]))
        return 0;
    for (int kind = INDEX; kind < VIEWS; kind++)
        if (views[kind].obj && !check_numbers(&views[kind], kind, b->count))
            return 0;
    b->has_parts = views[PARTS].obj != NULL;
    b->has_factors = views[FACTORS].obj != NULL;
    b->has_boxes = views[BOXES].obj != NULL;
    if (b->has_factors && b->sizes.pixel != 1 && b->sizes.pixel != 3)
        return wrong("factors: expected images of 1 or 3 bytes a pixel");
    b->changes = PyMem_Calloc((size_t)b->count, sizeof *b->changes);
    if (b->changes == NULL) {
        PyErr_NoMemory();
        return 0;
    }
    for (int64_t i = 0; i < b->count; i++) {
        Change *c = &b->changes[i];
        copy_numbers(&c->row, &views[INDEX], i, INDEX);
        copy_numbers(c->place, &views[PLACES], i, PLACES);
        if (b->has_parts)
            copy_numbers(c->part, &views[PARTS], i, PARTS);
        if (b->has_factors)
            copy_numbers(c->factors, &views[FACTORS], i, FACTORS);
        if (b->has_boxes)
            copy_numbers(c->box, &views[BOXES], i, BOXES);
        if (!check_change(b, c))
            return 0;
    }
    return 1;
}

/* `turned`: room for an image of the result, that quarter turns are made from. */
static void resized(const Batch *b, const Change *c, Resampler *r, uint8_t *out, uint8_t *turned)
{
    const Sizes *s = &b->sizes;
    const int64_t pitch = s->width * s->pixel, orientation = c->place[2];
    const Part part = {
        .first = b->source + c->row * b->pitch + c->part[0] * pitch + c->part[1] * s->pixel,
        .end = b->end,
        .pitch = pitch,
        .height = c->part[2],
        .width = c->part[3],
    };
    if (orientation % 2 == 0) {
        /* Two quarters are both directions. */
        resample(r, &part, out, s->pixel, orientation == 2 || orientation == MIRRORED,
                 orientation == 2 || orientation == (MIRRORED | 2), b->vectors,
                 downs_of(b->vectors));
        return;
    }
    resample(r, &part, turned, s->pixel, 0, 0, b->vectors, downs_of(b->vectors));
    const Sizes square = {s->out_height, s->out_width, s->out_height, s->out_width, s->pixel};
    arrange(&square, turned, out, 0, 0, orientation, b->vectors);
}

static int64_t between_ends(int64_t value, int64_t most)
{
    return value < 0 ? 0 : value > most ? most : value;
}

static void make_black(const Sizes *s, uint8_t *out, const int64_t *box)
{
    const int64_t top = between_ends(box[0], s->out_height), left = between_ends(box[1], s->out_width);
    const int64_t bottom = between_ends(box[2], s->out_height);
    const int64_t right = between_ends(box[3], s->out_width);
    for (int64_t y = top; y < bottom && left < right; y++)
        memset(out + (y * s->out_width + left) * s->pixel, 0, (size_t)((right - left) * s->pixel));
}

/* 0 where memory ran out. */
static int run(const Batch *b)
{
    const Sizes *s = &b->sizes;
    const int64_t pixels = s->out_height * s->out_width, bytes = pixels * s->pixel;
    Resampler r;
    uint8_t *turned = NULL;
    if (b->has_parts) {
        int made = make_resampler(&r, s->height, s->width, s->out_height, s->out_width, s->pixel);
        turned = malloc((size_t)bytes);
        if (!made || turned == NULL) {
            free_resampler(&r);
            free(turned);
            return 0;
        }
    }
    for (int64_t i = 0; i < b->count; i++) {
        const Change *c = &b->changes[i];
        uint8_t *out = b->out + i * bytes;
        if (b->has_parts && (c->part[2] != s->out_height || c->part[3] != s->out_width))
            resized(b, c, &r, out, turned);
        else
            arrange(s, b->source + c->row * b->pitch, out, b->has_parts ? c->part[0] : c->place[0],
                    b->has_parts ? c->part[1] : c->place[1], c->place[2], b->vectors);
        if (b->has_factors) {
            const Factors by = {(int32_t)c->factors[0], (int32_t)c->factors[1],
                                (int32_t)c->factors[2]};
            adjust(out, pixels, s->pixel, &by, colors_of(b->vectors));
        }
        if (b->has_boxes)
            make_black(s, out, c->box);
    }
    if (b->has_parts)
        free_resampler(&r);
    free(turned);
    return 1;
}

static int take_views(PyObject *const *objects, Py_buffer *views)
{
    for (int kind = 0; kind < VIEWS; kind++) {
        if (kind >= PARTS && objects[kind] == Py_None)
            continue;
        if (kind == SOURCE) {
            if (PyObject_GetBuffer(objects[kind], &views[kind], PyBUF_STRIDES | PyBUF_FORMAT) < 0)
                return 0;
        } else if (!get_buffer(objects[kind], &views[kind], names[kind], kind == OUT)) {
            return 0;
        }
    }
    return 1;
}

/* Make `out` of the images `index` of `source`. All others are int64 with a row for each of
   them, or None from `parts` on. `vectors`: bytes of the widest vectors that may be used. */
static PyObject *change(PyObject *module, PyObject *args)
{
    PyObject *objects[VIEWS];
    Py_buffer views[VIEWS] = {{0}};
    Batch b = {0};
    int most = 0, checked = 0, done = 0;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOOi:change", &objects[SOURCE], &objects[OUT],
                          &objects[INDEX], &objects[PLACES], &objects[PARTS], &objects[FACTORS],
                          &objects[BOXES], &most))
        return NULL;
    if (take_views(objects, views) && check(&b, views)) {
        checked = 1;
        b.vectors = usable(most);
        Py_BEGIN_ALLOW_THREADS
        done = run(&b);
        Py_END_ALLOW_THREADS
    }
    PyMem_Free(b.changes);
    release(views, VIEWS);
    if (done)
        Py_RETURN_NONE;
    return checked ? PyErr_NoMemory() : NULL;
}

static PyMethodDef methods[] = {
    {"change", change, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

MODULE(_augment, "Images resized, cut out, mirrored, turned, recolored and partly made black.", methods)
