/* The experts' input grid at decode time: MXFP8 (E4M3) blocks of 32, by the rules of quant/mx.py. */

#ifndef NONET_QUANT_H
#define NONET_QUANT_H

#include "bits.h"
#include "decode_model.h"

enum { PLAIN = 0, MXFP8 = 1, FLOOR = 0, EVEN = 1, CEIL = 2, RCEIL = 3 };

/* Exponent of the scale of a block whose largest magnitude is `top` > 0: E4M3 reaches 448 = 1.75 * 2^8. */
static int scale_exponent(float top, I rule) {
  uint32_t u = bits(top);
  if (rule == EVEN) u += 1u << 19;                     /* half a step of 3 mantissa bits, half up */
  if (rule == CEIL) u += (1u << 23) - 1;               /* anything above a power of two rounds up */
  if (rule == RCEIL) u += (1u << 23) - 1 - (3u << 21); /* anything above 1.75 times a power of two */
  int e = (int)(u >> 23) - 127 - 8;
  return e < -127 ? -127 : e > 127 ? 127 : e;
}

/* Nearest E4M3 value of x, ties to the even code, subnormals included, saturated at 448. */
static float e4m3(float x) {
  float a = fabsf(x);
  if (a < 0.015625f) a = (a + 16384.0f) - 16384.0f; /* below 2^-6 the grid is 2^-9: adding 2^14 leaves 2^-9 steps */
  else {
    uint32_t u = bits(a);
    u = (u + 0x7FFFF + ((u >> 20) & 1)) & 0xFFF00000u;
    a = value(u);
  }
  return copysignf(a > 448.0f ? 448.0f : a, x);
}

/* x[n] onto the grid, in place; n is a multiple of 32. */
static void quantise(const Model *m, float *x, I n) {
  if (m->input_format == PLAIN) return;
  for (I b = 0; b < n; b += 32) {
    float top = 0;
    for (I i = 0; i < 32; i++) top = fabsf(x[b + i]) > top ? fabsf(x[b + i]) : top;
    if (top == 0) continue;
    int e = scale_exponent(top, m->rule);
    float up = ldexpf(1.0f, e), down = ldexpf(1.0f, -e);
    for (I i = 0; i < 32; i++) x[b + i] = e4m3(x[b + i] * down) * up;
  }
}

#endif
