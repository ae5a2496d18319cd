/* Elementwise pieces of a training step in one pass over memory each, forward and backward, float32: RMSNorm, the gated
   activations, and the attention-residual mixture. The twins in torch are ops/fused.py.

   Rows are shared out statically, and every sum over rows is taken per thread and then over threads in order, so a
   result depends on the number of threads but not on their speed. */

#include "vector.h"

/* ----------------------------------------------------------------- RMSNorm */

/* y = x * r * w with r = 1 / sqrt(mean x^2 + eps), kept in inverse[n]. */
void rmsnorm_forward(const float *x, const float *w, float *y, float *inverse, I n, I D, float eps, I threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (I r = 0; r < n; r++) {
    const float *v = x + r * D;
    float s = 1.0f / sqrtf(dot(v, v, D) / D + eps);
    inverse[r] = s;
    for (I i = 0; i < D; i++) y[r * D + i] = v[i] * s * w[i];
  }
}

/* dx = r (w dy) - x r^3 / D * (x . w dy); dw[threads][D]: each thread's share, zeroed here. */
void rmsnorm_backward(const float *dy, const float *x, const float *w, const float *inverse, float *dx, float *dw, I n,
                      I D, I threads) {
  memset(dw, 0, threads * D * sizeof(float));
#pragma omp parallel for num_threads(threads) schedule(static)
  for (I t = 0; t < threads; t++) {
    float *mine = dw + t * D;
    for (I r = n * t / threads; r < n * (t + 1) / threads; r++) {
      const float *v = x + r * D, *d = dy + r * D;
      float s = inverse[r];
      V sums = {0};
      for (I i = 0; i < D; i += LANES) sums += at(v, i, D) * at(w, i, D) * at(d, i, D);
      float pull = sum(sums) * s * s * s / D;
      for (I i = 0; i < D; i++) {
        mine[i] += d[i] * v[i] * s;
        dx[r * D + i] = d[i] * w[i] * s - v[i] * pull;
      }
    }
  }
}

/* ------------------------------------------------------ gated activations */

/* b1 > 0: SiTU, [b1 tanh(g/b1) sigmoid(g)] [b2 tanh(u/b2)]; b1 = 0: silu(g) u. Chunks keep threads off each other's
 * lines. */
enum { PIECE = 1 << 12 };

void gated_forward(const float *gate, const float *up, float *y, I n, float b1, float b2, I threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (I a = 0; a < n; a += PIECE)
    for (I i = a; i < n && i < a + PIECE; i += LANES) {
      V g = at(gate, i, n), u = at(up, i, n), s = vsigmoid(g);
      put(y, i, n, b1 > 0 ? b1 * vtanh(g / b1) * s * b2 * vtanh(u / b2) : g * s * u);
    }
}

void gated_backward(const float *dy, const float *gate, const float *up, float *dgate, float *dup, I n, float b1,
                    float b2, I threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (I a = 0; a < n; a += PIECE)
    for (I i = a; i < n && i < a + PIECE; i += LANES) {
      V d = at(dy, i, n), g = at(gate, i, n), u = at(up, i, n), s = vsigmoid(g);
      if (b1 > 0) {
        V tg = vtanh(g / b1), tu = vtanh(u / b2);
        put(dgate, i, n, d * b2 * tu * s * (1.0f - tg * tg + b1 * tg * (1.0f - s)));
        put(dup, i, n, d * b1 * tg * s * (1.0f - tu * tu));
      } else {
        put(dgate, i, n, d * u * s * (1.0f + g * (1.0f - s)));
        put(dup, i, n, d * g * s);
      }
    }
}

/* ------------------------------------------- attention-residual mixture */

enum { SOURCES = 64 };

/* h = sum_j a_j v_j, a = softmax_j(r_j q . v_j), r_j = 1/rms(v_j). Kept for the way back: weights, r and q . v, [n][J].
 */
void mix_forward(const float *const *v, const float *q, float *h, float *weight, float *inverse, float *match, I J, I n,
                 I D, float eps, I threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (I r = 0; r < n; r++) {
    float *a = weight + r * J, top = -INFINITY, total = 0;
    for (I j = 0; j < J; j++) {
      const float *x = v[j] + r * D;
      V square = {0}, product = {0};
      for (I i = 0; i < D; i += LANES) {
        V e = at(x, i, D);
        square += e * e;
        product += e * at(q, i, D);
      }
      float s = 1.0f / sqrtf(sum(square) / D + eps), m = sum(product);
      inverse[r * J + j] = s;
      match[r * J + j] = m;
      a[j] = s * m;
      top = a[j] > top ? a[j] : top;
    }
    for (I j = 0; j < J; j++) total += a[j] = expf(a[j] - top);
    for (I j = 0; j < J; j++) a[j] /= total;
    for (I i = 0; i < D; i += LANES) {
      V e = {0};
      for (I j = 0; j < J; j++) e += a[j] * at(v[j] + r * D, i, D);
      put(h + r * D, i, D, e);
    }
  }
}

/* dv[j][n][D] and dq[threads][D]. With c_j = a_j (dh . v_j - sum_k a_k dh . v_k):
   dv_j = a_j dh + c_j (r_j q - match_j r_j^3 / D v_j), dq = sum c_j r_j v_j. */
void mix_backward(const float *dh, const float *const *v, const float *q, const float *weight, const float *inverse,
                  const float *match, float *const *dv, float *dq, I J, I n, I D, I threads) {
  memset(dq, 0, threads * D * sizeof(float));
#pragma omp parallel for num_threads(threads) schedule(static)
  for (I t = 0; t < threads; t++) {
    float *mine = dq + t * D, c[SOURCES];
    for (I r = n * t / threads; r < n * (t + 1) / threads; r++) {
      const float *d = dh + r * D, *a = weight + r * J;
      float mean = 0;
      for (I j = 0; j < J; j++) {
        c[j] = dot(d, v[j] + r * D, D);
        mean += a[j] * c[j];
      }
      for (I j = 0; j < J; j++) {
        const float *x = v[j] + r * D;
        float s = inverse[r * J + j], g = a[j] * (c[j] - mean) * s, pull = g * match[r * J + j] * s * s / D, w = a[j];
        float *out = dv[j] + r * D;
        for (I i = 0; i < D; i++) {
          mine[i] += g * x[i];
          out[i] = w * d[i] + g * q[i] - pull * x[i];
        }
      }
    }
  }
}
