/* What is looked for in records of TFRecord, and where it goes; without Python. */

#ifndef FLATOUT_EXAMPLE_JOB_H
#define FLATOUT_EXAMPLE_JOB_H

#include <stdlib.h>

#include "crc.h"

/* What is wrong with a record: `Bad` in __init__.py. */
enum {
    GOOD,
    OUTSIDE,
    LENGTH_CRC,
    LENGTH_DIFFERS,
    DATA_CRC,
    TRUNCATED,
    BAD_TAG,
    VARINT_TOO_LONG,
    WRONG_KIND,
    MISSING,
    WRONG_COUNT,
    INT32_OVERFLOW,
    SEVERAL_VALUES
};

/* How a scan ended: `End` in __init__.py. */
enum {
    END_WHOLE,
    END_FULL,
    END_HEADER,
    END_LENGTH_CRC,
    END_LENGTH_TOO_LARGE,
    END_DATA,
};

/* Numbers of the fields of Feature's oneof. */
typedef enum { BYTES = 1, FLOATS = 2, INTS = 3 } Kind;

#define RAGGED (-1)

typedef struct {
    const uint8_t *name; /* behind the tag and the length that a record has before it */
    int64_t name_bytes;
    int64_t key_bytes; /* of all three; 0 for a name that is too long for this */
    Kind kind;
    int64_t width; /* values in each row, or RAGGED */
    int required;
    int64_t ragged; /* which of the ragged ones */
} Feature;

/* What is looked for in records. It does not change, so that threads may share it. */
typedef struct {
    Feature *features;
    int64_t count, ragged;
    int32_t *slots; /* features by the hash of their names; -1: none */
    uint64_t slot_mask;
} Plan;

/* Where the values of one feature go. */
typedef struct {
    void *values;
    int64_t room;           /* values of all rows */
    const int64_t *offsets; /* of the rows, if ragged */
    size_t item;            /* bytes of a value: 1, 4 or 8 */
    uint64_t fill;          /* bits of what a missing value becomes */
} Output;

typedef struct {
    const uint8_t *at, *end;
} Part;

/* Per feature, for one call; one more than there are features. */
typedef struct {
    int64_t row;   /* the last one where the feature was found */
    int32_t after; /* the feature that came after it; the last place is for the first feature */
    Part entry;    /* of the map, in that row */
} Memory;

typedef struct {
    const uint8_t *text;
    int64_t bytes;
    const int64_t *starts, *ends;
    int64_t rows;
    int check;
    const Plan *plan;
    const Output *outputs; /* NULL: only lengths are measured */
    int64_t *lengths;      /* [ragged][rows] */
    uint8_t *status;
    int64_t *at;
    Memory *memory;
} Job;

/* Of a frame: the length and its checksum stand before the data, the data's checksum behind. */
#define HEADER 12
#define FOOTER 4

/* The numbers of the wire format. */
enum { WIRE_VARINT, WIRE_8_BYTES, WIRE_BYTES, WIRE_GROUP, WIRE_END_GROUP, WIRE_4_BYTES };
#define TAG(number) ((number) << 3 | WIRE_BYTES)
/* Tag and length before a name. */
#define KEY_HEAD 2

static ALWAYS_INLINE uint32_t load_4(const uint8_t *bytes)
{
    uint32_t word;
    memcpy(&word, bytes, 4);
#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ == __ORDER_BIG_ENDIAN__
    word = __builtin_bswap32(word);
#endif
    return word;
}

/* ---- frames ---- */

typedef struct {
    const uint8_t *text;
    int64_t at, stop;
    int64_t *starts, *ends;
    int64_t count, room;
} Frames;

/* Find records from `at` on, until an END_... is reached: the next frame then begins at `at`. */
static int frames_scan(Frames *frames)
{
    for (;;) {
        int64_t left = frames->stop - frames->at;
        const uint8_t *frame = frames->text + frames->at;
        if (left == 0)
            return END_WHOLE;
        if (frames->count == frames->room)
            return END_FULL;
        if (left < HEADER)
            return END_HEADER;
        uint8_t header[HEADER];
        memcpy(header, frame, HEADER);
        if (crc_masked(crc_best(UINT32_MAX, header, 8)) != load_4(header + 8))
            return END_LENGTH_CRC;
        uint64_t length = load_8(header);
        if (length > (uint64_t)(INT64_MAX - HEADER - FOOTER))
            return END_LENGTH_TOO_LARGE;
        if ((int64_t)length > left - HEADER - FOOTER)
            return END_DATA;
        frames->starts[frames->count] = frames->at + HEADER;
        frames->ends[frames->count] = frames->at + HEADER + (int64_t)length;
        frames->at += HEADER + (int64_t)length + FOOTER;
        frames->count++;
    }
}

/* GOOD if both checksums and the length of the frame around a record are right. */
static ALWAYS_INLINE int check_frame(const Job *job, int64_t start, int64_t stop, Crc *crc,
                                     int64_t *wrong)
{
    const uint8_t *record = job->text + start;
    *wrong = start;
    if (start < HEADER || job->bytes - stop < FOOTER)
        return OUTSIDE;
    *wrong = start - HEADER;
    if (crc_masked(crc(UINT32_MAX, record - HEADER, 8)) != load_4(record - 4))
        return LENGTH_CRC;
    if (load_8(record - HEADER) != (uint64_t)(stop - start))
        return LENGTH_DIFFERS;
    *wrong = start;
    return crc_masked(crc(UINT32_MAX, record, stop - start)) == load_4(record + stop - start)
               ? GOOD
               : DATA_CRC;
}

/* ---- names ---- */

/* The next 8 bytes of a name, or fewer and zeros. `is_padded`: 8 may be read. */
static ALWAYS_INLINE uint64_t name_word(const uint8_t *name, int64_t bytes, int is_padded)
{
    uint64_t word = 0;
    if (bytes >= 8)
        return load_8(name);
    if (is_padded)
        return load_8(name) << (64 - 8 * bytes);
    for (int64_t i = 0; i < bytes; i++)
        word |= (uint64_t)name[i] << (64 - 8 * bytes + 8 * i);
    return word;
}

static ALWAYS_INLINE int is_same(const uint8_t *a, const uint8_t *b, int64_t bytes, int is_padded)
{
    for (int64_t i = 0; i < bytes; i += 8)
        if (name_word(a + i, bytes - i, is_padded) != name_word(b + i, bytes - i, 1))
            return 0;
    return 1;
}

static ALWAYS_INLINE uint64_t name_hash(const uint8_t *name, int64_t bytes, int is_padded)
{
    uint64_t hash = (uint64_t)bytes;
    for (int64_t i = 0; i < bytes; i += 8) {
        hash = (hash ^ name_word(name + i, bytes - i, is_padded)) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 32;
    }
    return hash;
}

/* The feature of that name, or -1. */
static ALWAYS_INLINE int32_t find_name(const Plan *plan, const uint8_t *name, int64_t bytes,
                                       int is_padded)
{
    uint64_t slot = name_hash(name, bytes, is_padded);
    for (;; slot++) {
        int32_t found = plan->slots[slot & plan->slot_mask];
        if (found < 0 || (plan->features[found].name_bytes == bytes &&
                          is_same(name, plan->features[found].name, bytes, is_padded)))
            return found;
    }
}

static void plan_free(Plan *plan)
{
    if (plan == NULL)
        return;
    for (int64_t i = 0; plan->features != NULL && i < plan->count; i++)
        if (plan->features[i].name != NULL)
            free((void *)(plan->features[i].name - KEY_HEAD));
    free(plan->features);
    free(plan->slots);
    free(plan);
}

/* A plan of features that have no name yet, or NULL without memory. */
static Plan *plan_new(int64_t count)
{
    Plan *plan = calloc(1, sizeof *plan);
    uint64_t slots = 4;
    if (plan == NULL)
        return NULL;
    while (slots < 2 * (uint64_t)count)
        slots *= 2;
    plan->count = count;
    plan->slot_mask = slots - 1;
    plan->features = calloc((size_t)count + 1, sizeof *plan->features);
    plan->slots = malloc(slots * sizeof *plan->slots);
    if (plan->features == NULL || plan->slots == NULL) {
        plan_free(plan);
        return NULL;
    }
    memset(plan->slots, -1, slots * sizeof *plan->slots);
    return plan;
}

/* Name feature `i`, whose other fields are set. 0 without memory, -1 if another has the name. */
static int plan_name(Plan *plan, int32_t i, const uint8_t *name, int64_t bytes)
{
    Feature *feature = &plan->features[i];
    uint8_t *copy = calloc(KEY_HEAD + (size_t)bytes + 8, 1); /* for reading words */
    if (copy == NULL)
        return 0;
    copy[0] = TAG(1);
    copy[1] = (uint8_t)bytes;
    memcpy(copy + KEY_HEAD, name, (size_t)bytes);
    feature->name = copy + KEY_HEAD;
    feature->name_bytes = bytes;
    feature->key_bytes = bytes < 128 ? KEY_HEAD + bytes : 0;
    if (feature->width == RAGGED)
        feature->ragged = plan->ragged++;
    if (find_name(plan, feature->name, bytes, 1) >= 0)
        return -1;
    uint64_t slot = name_hash(feature->name, bytes, 1);
    while (plan->slots[slot & plan->slot_mask] >= 0)
        slot++;
    plan->slots[slot & plan->slot_mask] = i;
    return 1;
}

/* ---- rows of the outputs ---- */

/* The places of a row's values. 0 if someone has spoiled the offsets meanwhile. */
static ALWAYS_INLINE int row_places(const Feature *feature, const Output *output, int64_t row,
                                    int64_t *first, int64_t *capacity)
{
    if (feature->width != RAGGED) {
        *first = row * feature->width;
        *capacity = feature->width;
        return 1;
    }
    int64_t stop = read_once(output->offsets, row + 1);
    *first = read_once(output->offsets, row);
    *capacity = stop - *first;
    return *first >= 0 && stop >= *first && stop <= output->room;
}

static ALWAYS_INLINE void put_bits(const Output *output, int64_t place, uint64_t bits)
{
    if (output->item == 8) {
        ((uint64_t *)output->values)[place] = bits;
    } else if (output->item == 4) {
        uint32_t half = (uint32_t)bits;
        memcpy((uint32_t *)output->values + place, &half, 4);
    } else {
        ((uint8_t *)output->values)[place] = (uint8_t)bits;
    }
}

static ALWAYS_INLINE void fill(const Output *output, int64_t first, int64_t count)
{
    for (int64_t i = 0; i < count; i++)
        put_bits(output, first + i, output->fill);
}

static void zero_row(const Job *job, int64_t row)
{
    const Plan *plan = job->plan;
    for (int64_t i = 0; i < plan->count; i++) {
        const Feature *feature = &plan->features[i];
        int64_t first, capacity;
        if (job->outputs == NULL) {
            if (feature->width == RAGGED)
                job->lengths[feature->ragged * job->rows + row] = 0;
        } else if (row_places(feature, &job->outputs[i], row, &first, &capacity) && capacity > 0) {
            size_t item = job->outputs[i].item;
            char *values = (char *)job->outputs[i].values + (size_t)first * item;
            memset(values, 0, (size_t)capacity * item);
        }
    }
}

#endif
