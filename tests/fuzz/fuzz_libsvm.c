/* libFuzzer harness of libsvm/core.h: no access outside of any buffer, and the same results from
   each of its ways. Built and run by `run`, beside this file.

   The first bytes choose what is read and how; the rest is the text. All buffers have their exact
   size, so that AddressSanitizer sees an access beyond. Each text is read three times, by different
   code into memory with different contents: what comes out must be the same. */

#include <stdio.h>

#include "libsvm/core.h"

enum { HEADER = 16, MOST_ROWS = 64 };

/* No chunk is plain: everything is read the exact way. */
static int chunk_none(Chunk *chunk, const uint8_t *text, uint32_t size, int is_end, int64_t last)
{
    (void)text, (void)size, (void)is_end, (void)last;
    chunk->used = 0;
    chunk->is_whole = 0;
    return 0;
}

typedef struct {
    int64_t starts[MOST_ROWS], ends[MOST_ROWS], offsets[MOST_ROWS + 1];
    int64_t rows;
} Ranges;

static void add(Ranges *ranges, int64_t start, int64_t end)
{
    if (ranges->rows < MOST_ROWS) {
        ranges->starts[ranges->rows] = start;
        ranges->ends[ranges->rows++] = end;
    }
}

/* Lines with or without their newlines, the whole text, or any numbers at all. */
static void choose_ranges(Ranges *ranges, const uint8_t *header, const uint8_t *text, int64_t bytes)
{
    int64_t start = 0;
    int how = header[2] & 3;
    ranges->rows = 0;
    if (how == 2) {
        add(ranges, 0, bytes);
    } else if (how == 3) {
        for (int i = 4; i + 3 < HEADER; i += 2)
            add(ranges, (int8_t)header[i] + bytes * (header[i + 1] & 3) / 3,
                (int8_t)header[i + 2] + bytes * (header[i + 3] & 3) / 3);
        add(ranges, INT64_MIN, INT64_MAX);
        add(ranges, INT64_MAX, INT64_MIN);
        add(ranges, 0, INT64_MAX);
        add(ranges, INT64_MIN, 0);
    } else {
        for (int64_t i = 0; i < bytes; i++) {
            if (text[i] == '\n') {
                add(ranges, start, i + how);
                start = i + 1;
            }
        }
        add(ranges, start, bytes);
    }
}

static void *memory(int64_t count, size_t size, int contents)
{
    size_t bytes = (size_t)count * size;
    void *made = malloc(bytes > 0 ? bytes : 1);
    memset(made, contents, bytes);
    return made;
}

/* Run `job` into its own memory. */
static void run(Libsvm *job, ReadChunk *read, int contents, int has_qid)
{
    job->status = memory(job->rows, 1, contents);
    job->at = memory(job->rows, 8, 0);
    job->labels = memory(job->rows, size_of(job->label_kind), contents);
    job->qid = has_qid ? memory(job->rows, 8, contents) : NULL;
    job->lengths = job->sink == SURVEY ? memory(job->rows, 4, contents) : NULL;
    job->ids = job->sink == PAIRS ? memory(job->items, size_of(job->id_kind), contents) : NULL;
    job->values = job->sink == PAIRS ? memory(job->items, size_of(job->value_as), contents) : NULL;
    job->out = job->sink == DENSE ? memory(job->rows * job->limit, 4, contents) : NULL;
    job->low = INT64_MAX;
    job->high = -1;
    int64_t bad = libsvm_read(job, read);
    for (int64_t row = 0; row < job->rows; row++)
        bad -= job->status[row] != GOOD;
    if (bad != 0)
        abort();
}

static void drop(Libsvm *job)
{
    free(job->status), free(job->at), free(job->labels), free(job->qid);
    free(job->lengths), free(job->ids), free(job->values), free(job->out);
}

static void expect_same(const void *one, const void *other, int64_t count, size_t size)
{
    if (one != NULL && memcmp(one, other, (size_t)count * size) != 0)
        abort();
}

static void expect_same_results(const Libsvm *one, const Libsvm *other)
{
    expect_same(one->status, other->status, one->rows, 1);
    expect_same(one->at, other->at, one->rows, 8);
    expect_same(one->labels, other->labels, one->rows, size_of(one->label_kind));
    expect_same(one->qid, other->qid, one->rows, 8);
    expect_same(one->lengths, other->lengths, one->rows, 4);
    expect_same(one->ids, other->ids, one->items, size_of(one->id_kind));
    expect_same(one->values, other->values, one->items, size_of(one->value_as));
    if (one->sink == DENSE)
        expect_same(one->out, other->out, one->rows * one->limit, 4);
    if (one->low != other->low || one->high != other->high)
        abort();
}

/* A survey by the same rules finds the same rows bad, for the same reasons. */
static void expect_same_survey(const Libsvm *one)
{
    Libsvm survey = *one;
    survey.sink = SURVEY;
    survey.label_kind = FLOAT64;
    run(&survey, fastest(), 0x33, 1);
    expect_same(one->status, survey.status, one->rows, 1);
    expect_same(one->at, survey.at, one->rows, 8);
    drop(&survey);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static const int64_t LIMITS[] = {0, 1, 7, 130, 1000, 1LL << 31, 1LL << 40, INT64_MAX};
    static const Kind LABELS[] = {FLOAT32, FLOAT64, INT64, FLOAT32};
    if (size < HEADER)
        return 0;
    int64_t bytes = (int64_t)size - HEADER, room = data[1] >> 3;
    Sink sink = (Sink)((data[0] & 3) % 3);
    int has_qid = sink == SURVEY || data[0] >> 7;
    uint8_t *text = memory(bytes, 1, 0);
    Ranges ranges;
    memcpy(text, data + HEADER, (size_t)bytes);
    choose_ranges(&ranges, data, text, bytes);
    for (int64_t i = 0; i <= ranges.rows; i++)
        ranges.offsets[i] = i * room;
    int64_t *starts = memory(ranges.rows, 8, 0), *ends = memory(ranges.rows, 8, 0);
    int64_t *offsets = memory(ranges.rows + 1, 8, 0);
    memcpy(starts, ranges.starts, (size_t)ranges.rows * 8);
    memcpy(ends, ranges.ends, (size_t)ranges.rows * 8);
    memcpy(offsets, ranges.offsets, (size_t)(ranges.rows + 1) * 8);

    Libsvm job = {.text = text,
                  .bytes = bytes,
                  .starts = starts,
                  .ends = ends,
                  .rows = ranges.rows,
                  .base = data[0] >> 2 & 1,
                  .limit = LIMITS[sink == DENSE ? (data[1] & 7) % 5 : data[1] & 7],
                  .label_as = LABELS[data[0] >> 5 & 3],
                  .value_as = sink != DENSE && data[0] & 16 ? FLOAT64 : FLOAT32,
                  .sink = sink,
                  .room = sink == PAIRS ? room : INT32_MAX,
                  .offsets = offsets,
                  .items = sink == PAIRS ? ranges.rows * room : 0,
                  .id_kind = data[0] & 8 ? INT32 : INT64};
    job.label_kind = sink == SURVEY ? FLOAT64 : job.label_as;
    if (job.id_kind == INT32 && job.limit > 1LL << 31)
        job.limit = 1LL << 31;
    Libsvm other = job, third = job;
    run(&job, fastest(), 0xAA, has_qid);
    run(&other, chunk_portable, 0x55, has_qid);
    run(&third, chunk_none, 0x00, has_qid);
    expect_same_results(&job, &other);
    expect_same_results(&job, &third);
    expect_same_survey(&job);
    drop(&job), drop(&other), drop(&third);
    free(text), free(starts), free(ends), free(offsets);
    return 0;
}
