/* Lines of a text, byte ranges of a file, and rows of bytes to and from columns; without Python. */

#ifndef FLATOUT_LINES_CORE_H
#define FLATOUT_LINES_CORE_H

#include <errno.h>
#include <string.h>
#include <sys/uio.h>

#include "../shared/rows.h"

/* ---- newlines ---- */

#define BLOCK 64

/* Bit i: byte i is a newline, of the first `count` where fewer than 64 may be read. */
static inline uint64_t newlines_of(const uint8_t *bytes, int64_t count)
{
    uint8_t block[BLOCK] = {0};
    if (count >= BLOCK)
        return places_of('\n', bytes);
    memcpy(block, bytes, (size_t)count);
    return places_of('\n', block);
}

/* Which lines of `bytes` are wanted, and room for where they are. */
typedef struct {
    const uint8_t *bytes;
    int64_t at, stop;       /* what is still to be looked through; a line begins at `at` */
    int64_t *starts, *ends; /* filled up to `count`, room for `room` */
    int64_t count, room;
    const uint8_t *comment; /* NULL: no line is a comment */
    size_t comment_bytes;
    int skip_blank;
    uint8_t white[256]; /* 1 for the bytes that may stand before a comment and in a blank line */
} Lines;

static inline int is_wanted(const Lines *lines, int64_t start, int64_t end)
{
    const uint8_t *bytes = lines->bytes;
    while (start < end && lines->white[bytes[start]])
        start++;
    if (start == end)
        return !lines->skip_blank;
    return lines->comment == NULL || bytes[start] != lines->comment[0] ||
           (size_t)(end - start) < lines->comment_bytes ||
           memcmp(bytes + start, lines->comment, lines->comment_bytes) != 0;
}

/* Keep the line if it is wanted. 0 where there is no room for it. */
static inline int add_line(Lines *lines, int64_t start, int64_t end)
{
    if (end > start && lines->bytes[end - 1] == '\r')
        end--;
    if (!is_wanted(lines, start, end))
        return 1;
    if (lines->count >= lines->room)
        return 0;
    lines->starts[lines->count] = start;
    lines->ends[lines->count] = end;
    lines->count++;
    return 1;
}

/* Fill `starts` and `ends` up to the end of the text, or up to the first line without room: there
   `at` stays, to go on with more room. */
static void lines_index(Lines *lines)
{
    for (int64_t block = lines->at; block < lines->stop; block += BLOCK) {
        uint64_t mask = newlines_of(lines->bytes + block, lines->stop - block);
        for (; mask != 0; mask &= mask - 1) {
            int64_t newline = block + __builtin_ctzll(mask);
            if (!add_line(lines, lines->at, newline))
                return;
            lines->at = newline + 1;
        }
    }
    /* The last line may lack its newline. */
    if (lines->at < lines->stop && add_line(lines, lines->at, lines->stop))
        lines->at = lines->stop;
}

/* ---- byte ranges of a file ---- */

#define NEAR 4096            /* a shorter gap is read and thrown away */
#define MOST_PARTS 512       /* of one preadv: Linux takes 1024 */
#define MOST_BYTES (1 << 30) /* of one preadv, unless a single row is longer */

enum { READ_DONE, READ_INTERRUPTED, READ_FAILED, READ_ENDED, READ_OUTSIDE };

typedef struct {
    int fd;
    const int64_t *starts, *ends, *places;
    uint8_t *out;
    int64_t out_bytes, rows;
    int64_t row; /* the next to read, or the one that went wrong */
    int64_t at;  /* READ_ENDED: the first byte of this row that the file lacks */
} Reading;

/* One preadv: rows that follow each other closely in the file, and what lies between them. */
typedef struct {
    struct iovec parts[MOST_PARTS];
    struct {
        int64_t row, start;
    } owners[MOST_PARTS]; /* the row that a part belongs to, or comes before */
    int count;
    int64_t from, to, next_row;
    uint8_t sink[NEAR];
} Group;

static int is_inside(const Reading *reading, int64_t start, int64_t end, int64_t place)
{
    return start >= 0 && end >= start && place >= 0 && place <= reading->out_bytes &&
           end - start <= reading->out_bytes - place;
}

static void add_part(Group *group, uint8_t *to, int64_t bytes, int64_t row, int64_t start)
{
    group->parts[group->count].iov_base = to;
    group->parts[group->count].iov_len = (size_t)bytes;
    group->owners[group->count].row = row;
    group->owners[group->count].start = start;
    group->count++;
}

static void gather_group(const Reading *reading, Group *group)
{
    int64_t row = reading->row;
    group->count = 0;
    for (; row < reading->rows && group->count + 2 <= MOST_PARTS; row++) {
        int64_t start = reading->starts[row], end = reading->ends[row];
        int64_t place = reading->places[row];
        if (start == end)
            continue;
        if (group->count == 0) {
            group->from = group->to = start;
        } else if (start < group->to || start - group->to >= NEAR ||
                   end - group->from > MOST_BYTES) {
            break;
        }
        if (start > group->to)
            add_part(group, group->sink, start - group->to, row, start);
        add_part(group, reading->out + place, end - start, row, start);
        group->to = end;
    }
    group->next_row = row;
}

static int read_group(Reading *reading, Group *group)
{
    int64_t at = group->from;
    int part = 0;
    while (part < group->count) {
        ssize_t got = preadv(reading->fd, group->parts + part, group->count - part, (off_t)at);
        if (got < 0)
            return errno == EINTR ? READ_INTERRUPTED : READ_FAILED;
        if (got == 0) {
            int64_t start = group->owners[part].start;
            reading->row = group->owners[part].row;
            reading->at = at > start ? at : start;
            return READ_ENDED;
        }
        at += got;
        for (; part < group->count && (size_t)got >= group->parts[part].iov_len; part++)
            got -= (ssize_t)group->parts[part].iov_len;
        if (got > 0) {
            group->parts[part].iov_base = (uint8_t *)group->parts[part].iov_base + got;
            group->parts[part].iov_len -= (size_t)got;
        }
    }
    reading->row = group->next_row;
    return READ_DONE;
}

/* The first row from `row` on that is no range or does not fit into `out`, or `rows`. */
static int64_t rows_inside(const Reading *reading)
{
    for (int64_t i = reading->row; i < reading->rows; i++)
        if (!is_inside(reading, reading->starts[i], reading->ends[i], reading->places[i]))
            return i;
    return reading->rows;
}

/* Read on from `row`. After READ_INTERRUPTED it can be called again. */
static int rows_read(Reading *reading)
{
    Group group;
    while (reading->row < reading->rows) {
        gather_group(reading, &group);
        int result = read_group(reading, &group);
        if (result != READ_DONE)
            return result;
    }
    return READ_DONE;
}

/* ---- rows to columns and back ---- */

#define AHEAD 20        /* rows that are fetched before their turn */
#define MOST_FETCH 1024 /* bytes in line to fetch; of more the hardware sees the rest come */
#define MOST_SPANS 16   /* in different places; many columns are taken as they come */

/* `width` bytes of each row go from `from + row * from_step` to `to + i * to_step`. */
typedef struct {
    const uint8_t *from;
    uint8_t *to;
    int64_t from_step, to_step, width;
} Piece;

/* Pieces side by side: each line of the processor's cache is fetched once, which is faster. */
typedef struct {
    uintptr_t from;
    int64_t step, bytes;
} Span;

static int spans_of(const Piece *pieces, int64_t count, Span *spans)
{
    int found = 0;
    for (const Piece *piece = pieces; piece < pieces + count; piece++) {
        uintptr_t from = (uintptr_t)piece->from;
        Span *last = found > 0 ? &spans[found - 1] : NULL;
        if (last != NULL && last->step == piece->from_step && from >= last->from &&
            from <= last->from + (uintptr_t)last->bytes + 64) {
            int64_t bytes = (int64_t)(from - last->from) + piece->width;
            last->bytes = bytes > last->bytes ? bytes : last->bytes;
        } else if (found < MOST_SPANS) {
            spans[found++] = (Span){from, piece->from_step, piece->width};
        }
    }
    return found;
}

/* Always inline: gcc takes a call for one without effects, and drops it. */
static inline __attribute__((always_inline)) void fetch_row(const Span *spans, int count,
                                                            int64_t row)
{
    for (const Span *span = spans; span < spans + count; span++) {
        uintptr_t from = span->from + (uintptr_t)(row * span->step);
        uintptr_t end = from + (uintptr_t)(span->bytes < MOST_FETCH ? span->bytes : MOST_FETCH);
        for (from &= ~(uintptr_t)63; from < end; from += 64)
            __builtin_prefetch((const void *)from, 0, 2);
    }
}

static inline void copy_piece(uint8_t *to, const uint8_t *from, int64_t width)
{
    /* Numbers, without a call. */
    if (width == 4)
        memcpy(to, from, 4);
    else if (width == 8)
        memcpy(to, from, 8);
    else
        memcpy(to, from, (size_t)width);
}

/* Move the rows `index`, or the first `count` where it is NULL. */
static void rows_move(const Piece *pieces, int64_t piece_count, const int64_t *index, int64_t count)
{
    Span spans[MOST_SPANS];
    int span_count = spans_of(pieces, piece_count, spans);
    for (int64_t i = 0; i < count; i++) {
        int64_t row = index != NULL ? index[i] : i;
        if (index != NULL && i + AHEAD < count)
            fetch_row(spans, span_count, index[i + AHEAD]);
        for (const Piece *piece = pieces; piece < pieces + piece_count; piece++)
            copy_piece(piece->to + i * piece->to_step, piece->from + row * piece->from_step,
                       piece->width);
    }
}

#endif
