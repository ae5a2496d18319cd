/* decode(encode(x)) of microscaling blocks in one pass: the additions of quant/mx.py (`_fake_part`), so its bits. */

#include <math.h>

#include "bits.h"

typedef int64_t I;
enum { WIDTH = 32 };

/* Bits of the largest magnitude of a block; magnitudes keep their order as integers, a NaN comes last. */
static inline uint32_t top_of(const float *x) {
  uint32_t top = 0;
  for (I i = 0; i < WIDTH; i++) {
    const uint32_t magnitude = bits(x[i]) & 0x7FFFFFFFu;
    top = magnitude > top ? magnitude : top;
  }
  return top;
}

/* out[32 * blocks] from x. step: what a rule adds to the largest magnitude's bits (formats.py); shift: 2^(23 - mantissa);
   reach: what every magnitude must stay below. Returns 0, with `out` half written, where one does not. */
int mx_fake(const float *x, float *out, I blocks, uint32_t step, float shift, float reach, float least, float to_floor,
            float to_limit, I threads) {
  int fine = 1;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(&& : fine) if (threads > 1)
  for (I b = 0; b < blocks; b++) {
    const float *from = x + b * WIDTH;
    float *to = out + b * WIDTH;
    const uint32_t top = top_of(from);
    fine = fine && value(top) < reach; /* a NaN is not less */
    const float binade = fmaxf(value((top + step) & 0xFF800000u), least);
    const float floor = binade * to_floor, limit = binade * to_limit;
    for (I i = 0; i < WIDTH; i++) {
      const uint32_t u = bits(from[i]), sign = u & 0x80000000u;
      const float y = value(u ^ sign), grid = shift * value(bits(y > floor ? y : floor) & ~1u);
      const float rounded = (y + grid) - grid;
      to[i] = value(bits(rounded < limit ? rounded : limit) | sign);
    }
  }
  return fine;
}
