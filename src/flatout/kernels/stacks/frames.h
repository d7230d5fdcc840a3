/* The chain of a Python thread's frames, read from another thread without the interpreter's lock. */

#ifndef FLATOUT_STACKS_FRAMES_H
#define FLATOUT_STACKS_FRAMES_H

#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define DEEPEST 256  /* frames of a stack that are looked at */
#define NEEDED 3     /* frames that are known, to find out how they lie in memory */
#define FRAME_WORDS 12
#define STATE_WORDS 64
#define CODE_HEAD 512 /* bytes of a code object, at most, before its instructions */
#define BEFORE 3072   /* bytes in front of a frame that are read with it: its callers often lie there */

typedef struct {
    uintptr_t code;
    long place; /* of its instruction, in bytes */
} Known;

/* Where things are: in words from the start of a thread's state and of a frame. */
typedef struct {
    uintptr_t top;    /* where the innermost frame, or what points to it, stands */
    int is_indirect;  /* words behind what top points to, or -1 where it is the frame */
    int code, caller, instruction;
    uintptr_t head;   /* bytes of a code object before its instructions */
} Layout;

/* Copies bytes of this process; returns whether they could all be read. */
static int peek(void *into, uintptr_t from, size_t bytes)
{
    struct iovec here = {into, bytes}, there = {(void *)from, bytes};
    return process_vm_readv(getpid(), &here, 1, &there, 1, 0) == (ssize_t)bytes;
}

/* Some Pythons mark pointers in their lowest bits. */
static uintptr_t unmarked(uintptr_t pointer)
{
    return pointer & ~(uintptr_t)7;
}

/* Whether the frame at an address is the innermost known one, and its callers the others. */
static int fits(Layout *layout, uintptr_t address, const Known *known)
{
    uintptr_t frame[NEEDED][FRAME_WORDS];
    if (address % sizeof address || !peek(frame[0], address, sizeof frame[0]))
        return 0;
    for (int code = 0; code < FRAME_WORDS; code++) {
        if (unmarked(frame[0][code]) != known[0].code)
            continue;
        for (int caller = 0; caller < FRAME_WORDS; caller++) {
            int at = 1;
            for (; at < NEEDED; at++) {
                uintptr_t back = frame[at - 1][caller];
                if (back % sizeof back || !peek(frame[at], back, sizeof frame[at]) ||
                    unmarked(frame[at][code]) != known[at].code)
                    break;
            }
            if (at < NEEDED)
                continue;
            for (int place = 0; place < FRAME_WORDS; place++) {
                uintptr_t head = frame[0][place] - known[0].code - (uintptr_t)known[0].place;
                for (at = 0; at < NEEDED; at++)
                    if (frame[at][place] != known[at].code + (uintptr_t)known[at].place + head)
                        break;
                if (at == NEEDED && head > 0 && head < CODE_HEAD) {
                    layout->code = code;
                    layout->caller = caller;
                    layout->instruction = place;
                    layout->head = head;
                    return 1;
                }
            }
        }
    }
    return 0;
}

/* Finds out how the calling thread's frames lie in memory; returns whether that could be done. */
static int find_frames(Layout *layout, uintptr_t state, const Known *known)
{
    uintptr_t words[STATE_WORDS], behind[4];
    for (int at = 0; at < STATE_WORDS; at++) {
        layout->top = state + at * sizeof *words;
        if (!peek(&words[at], layout->top, sizeof *words))
            return 0;
        layout->is_indirect = -1;
        if (fits(layout, words[at], known))
            return 1;
        if (words[at] % sizeof *words || !peek(behind, words[at], sizeof behind))
            continue;
        for (int word = 0; word < 4; word++) {
            layout->is_indirect = word;
            if (fits(layout, behind[word], known))
                return 1;
        }
    }
    return 0;
}

/* The frames that run now, innermost first; returns how many, 0 where they could not be read. */
static int frames_of(const Layout *layout, Known *stack, int most)
{
    static unsigned char block[BEFORE + FRAME_WORDS * sizeof(uintptr_t)];
    uintptr_t frame, first = 0, last = 0, words[FRAME_WORDS];
    int depth = 0;
    if (!peek(&frame, layout->top, sizeof frame))
        return 0;
    if (layout->is_indirect >= 0 &&
        !peek(&frame, frame + layout->is_indirect * sizeof frame, sizeof frame))
        return 0;
    for (; frame && depth < most; depth++) {
        if (frame < first || frame >= last) {
            first = frame - BEFORE;
            last = frame + 1;
            if (!peek(block, first, sizeof block)) {
                first = last = 0; /* what stands in front of it is no memory */
                if (!peek(words, frame, sizeof words))
                    return 0;
            }
        }
        if (last)
            memcpy(words, block + (frame - first), sizeof words);
        stack[depth].code = unmarked(words[layout->code]);
        stack[depth].place =
            (long)(words[layout->instruction] - stack[depth].code - layout->head);
        frame = words[layout->caller];
    }
    return frame ? 0 : depth; /* too deep: whose stack that is cannot be told */
}

#endif
