/* Columns to records of TFRecord that hold tf.train.Example messages; without Python.

   The sizes of all records are found first, then each is written into its place. Columns may be
   changed by others meanwhile: no write leaves the record's place, whatever stands in them. */

#ifndef FLATOUT_EXAMPLE_WRITER_H
#define FLATOUT_EXAMPLE_WRITER_H

#include "core.h"

/* A column: `width` values of each row, or those between two offsets. */
typedef struct {
    const uint8_t *name;
    int64_t name_bytes;
    Kind kind; /* uint8 is the bytes of one value */
    const void *values;
    int64_t room; /* values that there are */
    int64_t width;
    const int64_t *offsets;
} Column;

typedef struct {
    const Column *columns;
    int64_t count, rows;
    int64_t *offsets; /* [rows + 1] of the frames */
    uint8_t *out;
    int64_t out_bytes;
} Writing;

/* Lengths of a row's messages, from the inside out. */
typedef struct {
    int64_t first, count;
    int64_t values, list, feature, entry;
} Sizes;

static ALWAYS_INLINE int64_t varint_bytes(uint64_t value)
{
    return ((63 - __builtin_clzll(value | 1)) * 9 + 73) >> 6;
}

/* Of a message with this many bytes, together with its tag and length. */
static ALWAYS_INLINE int64_t message_bytes(int64_t bytes)
{
    return 1 + varint_bytes((uint64_t)bytes) + bytes;
}

/* 0 if the offsets do not fit the values. */
static int find_sizes(const Column *column, int64_t row, Sizes *sizes)
{
    sizes->first = row * column->width;
    sizes->count = column->width;
    if (column->width == RAGGED) {
        sizes->first = read_once(column->offsets, row);
        sizes->count = read_once(column->offsets, row + 1) - sizes->first;
        if (sizes->first < 0 || sizes->count < 0 || sizes->count > column->room - sizes->first)
            return 0;
    }
    sizes->values = column->kind == FLOATS ? 4 * sizes->count : sizes->count;
    if (column->kind == INTS) {
        sizes->values = 0;
        for (int64_t i = 0; i < sizes->count; i++)
            sizes->values += varint_bytes(((const uint64_t *)column->values)[sizes->first + i]);
    }
    sizes->list = column->kind == BYTES || sizes->count > 0 ? message_bytes(sizes->values) : 0;
    sizes->feature = message_bytes(sizes->list);
    sizes->entry = message_bytes(column->name_bytes) + message_bytes(sizes->feature);
    return 1;
}

/* Fills `offsets`. Returns the first row with wrong offsets or of more than the 2^31 - 1 bytes that
   Protocol Buffers allow, or `rows`. */
static int64_t writer_sizes(const Writing *job)
{
    int64_t at = 0;
    for (int64_t row = 0; row < job->rows; row++) {
        int64_t features = 0;
        job->offsets[row] = at;
        for (int64_t i = 0; i < job->count; i++) {
            Sizes sizes;
            if (!find_sizes(&job->columns[i], row, &sizes))
                return row;
            features += message_bytes(sizes.entry);
        }
        if (message_bytes(features) > INT32_MAX)
            return row;
        at += HEADER + message_bytes(features) + FOOTER;
    }
    job->offsets[job->rows] = at;
    return job->rows;
}

static ALWAYS_INLINE void store_4(uint8_t *to, uint32_t word)
{
    for (int i = 0; i < 4; i++)
        to[i] = (uint8_t)(word >> 8 * i);
}

static ALWAYS_INLINE uint8_t *write_varint(uint8_t *to, uint64_t value)
{
    for (; value >= 128; value >>= 7)
        *to++ = (uint8_t)(value | 128);
    *to++ = (uint8_t)value;
    return to;
}

static ALWAYS_INLINE uint8_t *write_head(uint8_t *to, uint32_t tag, int64_t bytes)
{
    *to++ = (uint8_t)tag;
    return write_varint(to, (uint64_t)bytes);
}

/* Exactly `sizes->values` bytes, or NULL. */
static uint8_t *write_values(const Column *column, const Sizes *sizes, uint8_t *to)
{
    const uint8_t *end = to + sizes->values;
    if (column->kind == BYTES && sizes->count > 0) {
        memcpy(to, (const uint8_t *)column->values + sizes->first, (size_t)sizes->count);
        return to + sizes->count;
    }
    for (int64_t i = sizes->first; column->kind == INTS && i < sizes->first + sizes->count; i++) {
        uint64_t value = (uint64_t)read_once(column->values, i);
        if (end - to < LONG_VARINT && varint_bytes(value) > end - to)
            return NULL;
        to = write_varint(to, value);
    }
    for (int64_t i = sizes->first; column->kind == FLOATS && i < sizes->first + sizes->count; i++) {
        uint32_t bits;
        memcpy(&bits, (const float *)column->values + i, 4);
        store_4(to, bits);
        to += 4;
    }
    return to == end ? to : NULL;
}

/* Behind the entry, or NULL if it does not fit before `end`. */
static uint8_t *write_entry(const Column *column, int64_t row, uint8_t *to, const uint8_t *end)
{
    Sizes sizes;
    if (!find_sizes(column, row, &sizes) || message_bytes(sizes.entry) > end - to)
        return NULL;
    to = write_head(to, TAG(1), sizes.entry);
    to = write_head(to, TAG(1), column->name_bytes);
    memcpy(to, column->name, (size_t)column->name_bytes);
    to = write_head(to + column->name_bytes, TAG(2), sizes.feature);
    to = write_head(to, TAG((uint32_t)column->kind), sizes.list);
    if (sizes.list == 0)
        return to;
    to = write_head(to, TAG(1), sizes.values);
    return write_values(column, &sizes, to);
}

/* 0 if the row does not fit into its place any more. */
static int write_row(const Writing *job, int64_t row)
{
    int64_t start = read_once(job->offsets, row), stop = read_once(job->offsets, row + 1);
    if (start < 0 || stop > job->out_bytes || stop < start)
        return 0;
    int64_t bytes = stop - start - HEADER - FOOTER, features = bytes;
    if (bytes < message_bytes(0))
        return 0;
    while (message_bytes(features) > bytes)
        features--;
    uint8_t *record = job->out + start + HEADER, *end = record + bytes;
    uint8_t *to = write_head(record, TAG(1), features);
    for (int64_t i = 0; i < job->count && to != NULL; i++)
        to = write_entry(&job->columns[i], row, to, end);
    if (to != end)
        return 0;
    store_4(record - 12, (uint32_t)bytes);
    store_4(record - 8, 0);
    store_4(record - 4, crc_masked(crc_best(UINT32_MAX, record - HEADER, 8)));
    store_4(end, crc_masked(crc_best(UINT32_MAX, record, bytes)));
    return 1;
}

/* Returns the first row that did not fit, or `rows`. */
static int64_t writer_write(const Writing *job)
{
    int64_t row = 0;
    while (row < job->rows && write_row(job, row))
        row++;
    return row;
}

#endif
