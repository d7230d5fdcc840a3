/* Stacks as a tree: each place that was seen under its caller, with the time that ended there. */

#ifndef FLATOUT_STACKS_TREE_H
#define FLATOUT_STACKS_TREE_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "../clock/core.h"
#include "frames.h"

#define BINS 16
#define SLOTS (1u << 16) /* twice the most nodes */
#define MOST_NODES ((int)(SLOTS / 2))

typedef struct {
    uintptr_t code;
    long place;
    int caller;          /* -1 for the outermost */
    int looks;           /* that ended here */
    double lanes[LANES]; /* ns of those */
    double bins[BINS];   /* the same by steps */
} Node;

typedef struct {
    Node *nodes;
    int count, room;
    int *places;    /* of nodes, 1 more than their number, by their hash */
    long long width; /* steps to a bin */
} Tree;

static int tree_make(Tree *tree)
{
    tree->room = 256;
    tree->width = 1;
    tree->nodes = malloc((size_t)tree->room * sizeof *tree->nodes);
    tree->places = calloc(SLOTS, sizeof *tree->places);
    return tree->nodes != NULL && tree->places != NULL;
}

static void tree_free(Tree *tree)
{
    free(tree->nodes);
    free(tree->places);
}

/* Drops what was seen. */
static void tree_forget(Tree *tree)
{
    tree->count = 0;
    tree->width = 1;
    memset(tree->places, 0, SLOTS * sizeof *tree->places);
}

static uint32_t slot_of(uint64_t value)
{
    return (uint32_t)((value * 0x9E3779B97F4A7C15ull) >> 48);
}

/* The number of a place under its caller, -1 where there is no room for a new one. */
static int node_at(Tree *tree, int caller, const Known *at)
{
    uint32_t slot = slot_of(at->code ^ ((uint64_t)(uint32_t)at->place << 44) ^ ((uint64_t)caller << 20));
    Node *node;
    while (tree->places[slot]) {
        node = &tree->nodes[tree->places[slot] - 1];
        if (node->caller == caller && node->code == at->code && node->place == at->place)
            return tree->places[slot] - 1;
        slot = (slot + 1) % SLOTS;
    }
    if (tree->count >= MOST_NODES)
        return -1;
    if (tree->count == tree->room) {
        node = realloc(tree->nodes, 2 * (size_t)tree->room * sizeof *node);
        if (node == NULL)
            return -1;
        tree->nodes = node;
        tree->room *= 2;
    }
    node = &tree->nodes[tree->count];
    memset(node, 0, sizeof *node);
    node->code = at->code;
    node->place = at->place;
    node->caller = caller;
    tree->places[slot] = ++tree->count;
    return tree->count - 1;
}

/* Makes each bin stand for twice as many steps. */
static void widen(Tree *tree)
{
    tree->width *= 2;
    for (int at = 0; at < tree->count; at++) {
        double *bins = tree->nodes[at].bins;
        for (int bin = 0; bin < BINS / 2; bin++)
            bins[bin] = bins[2 * bin] + bins[2 * bin + 1];
        memset(bins + BINS / 2, 0, BINS / 2 * sizeof *bins);
    }
}

/* Adds a stack, innermost first. */
static void tree_add(Tree *tree, const Known *stack, int depth, int lane, long long step, double ns)
{
    int node = -1;
    for (int at = depth - 1; at >= 0; at--) {
        node = node_at(tree, node, &stack[at]);
        if (node < 0)
            return;
    }
    while (step >= BINS * tree->width)
        widen(tree);
    tree->nodes[node].looks++;
    tree->nodes[node].lanes[lane] += ns;
    tree->nodes[node].bins[step / tree->width] += ns;
}

#endif
