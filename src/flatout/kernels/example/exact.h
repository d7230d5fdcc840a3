/* A tf.train.Example message in any way that Protocol Buffers allow to write it; without Python.

   From left to right, byte by byte: slow, and able to say what is wrong, and where. */

#ifndef FLATOUT_EXAMPLE_EXACT_H
#define FLATOUT_EXAMPLE_EXACT_H

#include "job.h"

/* Of tags and lengths, and of values. */
#define SHORT_VARINT 5
#define LONG_VARINT 10

typedef struct {
    uint64_t number;
    int wire;
    Part part;      /* the value's bytes: behind the length, if it has one */
    uint64_t value; /* of a varint */
} Field;

/* Moves `part` behind the varint; where something is wrong it stays before it. */
static int read_varint(Part *part, int most, uint64_t *value)
{
    *value = 0;
    for (int i = 0; i < most; i++) {
        if (part->at + i >= part->end)
            return TRUNCATED;
        uint8_t byte = *(const volatile uint8_t *)(part->at + i);
        *value |= (uint64_t)(byte & 127) << 7 * i;
        if (byte < 128) {
            part->at += i + 1;
            return GOOD;
        }
    }
    return VARINT_TOO_LONG;
}

/* The next field; moves `part` behind it, or to what is wrong. */
static int read_field(Part *part, Field *field)
{
    const uint8_t *begin = part->at;
    uint64_t tag, length;
    int code = read_varint(part, SHORT_VARINT, &tag);
    if (code != GOOD)
        return code;
    field->number = tag >> 3;
    field->wire = (int)(tag & 7);
    if (field->number == 0 || tag > UINT32_MAX || field->wire == WIRE_GROUP ||
        field->wire == WIRE_END_GROUP || field->wire > WIRE_4_BYTES) {
        part->at = begin;
        return BAD_TAG;
    }
    field->part.at = part->at;
    if (field->wire == WIRE_VARINT) {
        code = read_varint(part, LONG_VARINT, &field->value);
        field->part.end = part->at;
        return code;
    }
    length = field->wire == WIRE_8_BYTES ? 8 : 4;
    if (field->wire == WIRE_BYTES)
        code = read_varint(part, SHORT_VARINT, &length);
    if (code != GOOD)
        return code;
    if (length > (uint64_t)(part->end - part->at)) {
        part->at = field->part.at;
        return TRUNCATED;
    }
    field->part.at = part->at;
    part->at += length;
    field->part.end = part->at;
    return GOOD;
}

static int is_message(const Field *field, uint64_t number)
{
    return field->number == number && field->wire == WIRE_BYTES;
}

/* An entry of the map: which feature it is, if it is one that is looked for. */
static int read_entry(const Job *job, int64_t row, Part entry, Part *wrong)
{
    Part part = entry, name = {entry.at, entry.at};
    while (part.at < part.end) {
        Field field;
        int code = read_field(&part, &field);
        if (code != GOOD) {
            *wrong = part;
            return code;
        }
        if (is_message(&field, 1))
            name = field.part;
    }
    int32_t found = find_name(job->plan, name.at, name.end - name.at, 0);
    if (found >= 0) {
        job->memory[found].row = row;
        job->memory[found].entry = entry;
    }
    return GOOD;
}

/* Of several entries with the same key the last one counts; several `features` are one. */
static int read_entries(const Job *job, int64_t row, Part record, Part *wrong)
{
    int code = GOOD;
    while (code == GOOD && record.at < record.end) {
        Field features;
        code = read_field(&record, &features);
        *wrong = record;
        if (code != GOOD || !is_message(&features, 1))
            continue;
        while (code == GOOD && features.part.at < features.part.end) {
            Field entry;
            code = read_field(&features.part, &entry);
            *wrong = features.part;
            if (code == GOOD && is_message(&entry, 1))
                code = read_entry(job, row, entry.part, wrong);
        }
    }
    return code;
}

/* The values of one feature in one row, as they are found. */
typedef struct {
    const Feature *feature;
    const Output *output; /* NULL: only counted */
    int64_t first, capacity, count;
    int64_t lists; /* of bytes: how many values, all of which are in `count` */
    int is_int32;
    Part wrong;
} Values;

static void put_value(Values *values, uint64_t bits)
{
    if (values->output != NULL && values->count < values->capacity)
        put_bits(values->output, values->first + values->count, bits);
    values->count++;
}

static int put_int(Values *values, uint64_t bits, const uint8_t *at)
{
    int64_t value = (int64_t)bits;
    if (values->is_int32 && (value < INT32_MIN || value > INT32_MAX)) {
        values->wrong.at = at;
        return INT32_OVERFLOW;
    }
    put_value(values, bits);
    return GOOD;
}

/* One field of an Int64List, FloatList or BytesList. */
static int put_field(Values *values, Field *field)
{
    Kind kind = values->feature->kind;
    Part part = field->part;
    int code = GOOD;
    if (field->number != 1)
        return GOOD;
    if (kind == INTS && field->wire == WIRE_VARINT)
        return put_int(values, field->value, part.at);
    if (kind == FLOATS && field->wire == WIRE_4_BYTES) {
        put_value(values, load_4(part.at));
        return GOOD;
    }
    if (field->wire != WIRE_BYTES)
        return GOOD;
    values->wrong = part;
    if (kind == FLOATS && (part.end - part.at) % 4 != 0)
        return TRUNCATED;
    values->lists++;
    while (code == GOOD && part.at < part.end) {
        const uint8_t *at = part.at;
        uint64_t bits;
        if (kind == INTS) {
            code = read_varint(&part, LONG_VARINT, &bits);
            values->wrong = part;
            if (code == GOOD)
                code = put_int(values, bits, at);
        } else {
            put_value(values, kind == FLOATS ? load_4(at) : *at);
            part.at += kind == FLOATS ? 4 : 1;
        }
    }
    return code;
}

/* Goes through the lists in an entry's Features. Without `values` it only tells the kind of the
   last list, and which one begins the run of that kind that ends there: as everywhere in a oneof, a
   list of another kind drops what was there before. */
static int read_lists(Part entry, Values *values, int64_t *first, Kind *kind, Part *wrong)
{
    int64_t list = 0;
    int code = GOOD;
    while (code == GOOD && entry.at < entry.end) {
        Field feature;
        code = read_field(&entry, &feature);
        *wrong = entry;
        if (code != GOOD || !is_message(&feature, 2))
            continue;
        while (code == GOOD && feature.part.at < feature.part.end) {
            Field field;
            code = read_field(&feature.part, &field);
            *wrong = feature.part;
            if (code != GOOD || field.wire != WIRE_BYTES || field.number > INTS)
                continue;
            if (values == NULL && (Kind)field.number != *kind) {
                *kind = (Kind)field.number;
                *first = list;
            }
            int is_wanted = values != NULL && list >= *first;
            list++;
            while (code == GOOD && is_wanted && field.part.at < field.part.end) {
                Field value;
                code = read_field(&field.part, &value);
                *wrong = field.part;
                if (code == GOOD) {
                    code = put_field(values, &value);
                    *wrong = values->wrong;
                }
            }
        }
    }
    return code;
}

static int check_count(const Values *values)
{
    const Feature *feature = values->feature;
    if (feature->kind == BYTES && values->lists > 1)
        return SEVERAL_VALUES;
    if (feature->width != RAGGED)
        return values->count == feature->width ? GOOD : WRONG_COUNT;
    return values->output == NULL || values->count <= values->capacity ? GOOD : WRONG_COUNT;
}

/* One feature of a row into its output, or its length. `wrong` comes as the record. */
static int exact_feature(const Job *job, int64_t row, int64_t i, Part *wrong)
{
    Values values = {.feature = &job->plan->features[i]};
    const Feature *feature = values.feature;
    const Memory *memory = &job->memory[i];
    const Part record = *wrong;
    int64_t first = 0;
    Kind kind = 0;
    int code;
    if (job->outputs != NULL) {
        values.output = &job->outputs[i];
        values.is_int32 = feature->kind == INTS && values.output->item == 4;
        if (!row_places(feature, values.output, row, &values.first, &values.capacity))
            return OUTSIDE;
    }
    if (memory->row == row) {
        code = read_lists(memory->entry, NULL, &first, &kind, wrong);
        if (code != GOOD)
            return code;
    }
    if (kind == 0 && feature->required) {
        *wrong = record;
        return MISSING;
    }
    if (kind != 0) {
        wrong->at = memory->entry.at;
        if (kind != feature->kind)
            return WRONG_KIND;
        code = read_lists(memory->entry, &values, &first, &kind, wrong);
        if (code != GOOD)
            return code;
        wrong->at = memory->entry.at;
        code = check_count(&values);
        if (code != GOOD)
            return code;
    }
    if (job->outputs != NULL)
        fill(values.output, values.first + values.count, values.capacity - values.count);
    else if (feature->width == RAGGED)
        job->lengths[feature->ragged * job->rows + row] = values.count;
    return GOOD;
}

/* Never inline: it is called rarely, and in the way of what is called often. */
static __attribute__((noinline)) int exact_row(const Job *job, int64_t row, int64_t start,
                                               int64_t stop, int64_t *at)
{
    *at = start;
    if (start < 0 || stop < start || stop > job->bytes)
        return OUTSIDE;
    int code = job->check ? check_frame(job, start, stop, crc_best, at) : GOOD;
    if (code != GOOD)
        return code;
    Part record = {job->text + start, job->text + stop}, wrong = record;
    for (int64_t i = 0; i < job->plan->count; i++)
        job->memory[i].row = -1;
    code = read_entries(job, row, record, &wrong);
    for (int64_t i = 0; code == GOOD && i < job->plan->count; i++) {
        wrong = record;
        code = exact_feature(job, row, i, &wrong);
    }
    *at = wrong.at - job->text;
    return code;
}

#endif
