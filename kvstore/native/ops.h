/* Reading the ops of a delta that lies in memory. */
#ifndef KVSTORE_OPS_H
#define KVSTORE_OPS_H

#include "bytes.h"
#include "kernel.h"

typedef struct {
    const uint8_t *from;
    uint64_t n;
    int copy; /* `from` is an offset in the parent, in `at` */
    uint64_t at;
} op;

KV_INLINE uint32_t get32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

/* Reads and checks the op at *at, and moves *at behind it. */
KV_INLINE int next_op(const uint8_t *delta, uint64_t n, uint64_t *at, uint64_t parent_size, op *o)
{
    const uint8_t *p = delta + *at;
    uint64_t left = n - *at;
    if (left < 9)
        return KV_TRUNCATED;
    uint8_t code = p[0];
    uint64_t arg = get64(p + 1);
    left -= 9;
    if (code == 1) {
        if (arg > left)
            return KV_TRUNCATED_LITERAL;
        o->copy = 0;
        o->from = p + 9;
        o->n = arg;
        *at += 9 + arg;
        return KV_OK;
    }
    if (code == 0) {
        if (left < 8)
            return KV_COPY_RANGE;
        uint64_t size = get64(p + 9);
        if (arg > parent_size || size > parent_size - arg)
            return KV_COPY_RANGE;
        o->copy = 1;
        o->at = arg;
        o->n = size;
        *at += 17;
        return KV_OK;
    }
    return KV_UNKNOWN_OP;
}

#endif
