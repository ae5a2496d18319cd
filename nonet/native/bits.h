/* A float32's bits as an integer, and back. */

#ifndef NONET_BITS_H
#define NONET_BITS_H

#include <stdint.h>
#include <string.h>

static inline uint32_t bits(float x) {
  uint32_t u;
  memcpy(&u, &x, sizeof u);
  return u;
}

static inline float value(uint32_t u) {
  float x;
  memcpy(&x, &u, sizeof x);
  return x;
}

#endif
