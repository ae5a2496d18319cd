/* Feed-forwards of one block of rows: dense, or routed experts beside a shared one (model/moe.py). */

#ifndef NONET_EXPERTS_H
#define NONET_EXPERTS_H

#include "decode_model.h"
#include "quant.h"

static void dense(const Model *m, const Layer *l, const float *h, I rows, float *out, float *s) {
  I F = l->F, D = m->D;
  float *gate = s, *up = gate + rows * F + LANES;
  linear(h, D, l->gate, l->gate_b, gate, F, rows, F, D);
  linear(h, D, l->up, l->up_b, up, F, rows, F, D);
  MAP(rows * F, gate, gate, activate(m, e, at(up, i_, n_)));
  linear(gate, F, l->down, l->down_b, out, D, rows, D, F);
}

/* Scores of one row, in place of its logits, and its top_k experts by score + bias (the lower index first among equals)
   with their weights. */
static void route(const Model *m, const Layer *l, float *scores, I *chosen, float *weights) {
  I E = m->E;
  MAP(E, scores, scores, vsigmoid(e));
  float total = m->renormalise ? 1e-20f : 0;
  for (I k = 0; k < m->top_k; k++) {
    I best = -1;
    for (I e = 0; e < E; e++) {
      int taken = 0;
      for (I j = 0; j < k; j++) taken |= chosen[j] == e;
      if (!taken && (best < 0 || scores[e] + l->bias[e] > scores[best] + l->bias[best])) best = e;
    }
    chosen[k] = best;
    weights[k] = scores[best];
    if (m->renormalise) total += scores[best];
  }
  for (I k = 0; k < m->top_k; k++) weights[k] = (m->renormalise ? weights[k] / total : weights[k]) * m->scale;
}

/* Rows that chose an expert are gathered and go through it together. */
static void routed(const Model *m, const Layer *l, const float *h, I rows, float *out, float *s) {
  I D = m->D, E = m->E, L = m->L, F = m->EF, K = m->top_k;
  I chosen[BLOCK * 64];
  float weights[BLOCK * 64];
  float *scores = s, *z = scores + rows * E + LANES, *mine = z + rows * L, *gate = mine + rows * L;
  float *up = gate + rows * F + LANES, *y = up + rows * F + LANES, *sum = y + rows * L, *rest = sum + rows * L;
  linear(h, D, l->router, 0, scores, E, rows, E, D);
  for (I r = 0; r < rows; r++) route(m, l, scores + r * E, chosen + r * K, weights + r * K);
  if (l->latent_down) linear(h, D, l->latent_down, 0, z, L, rows, L, D);
  else memcpy(z, h, rows * D * sizeof(float));
  quantise(m, z, rows * L);
  memset(sum, 0, rows * L * sizeof(float));
  for (I e = 0; e < E; e++) {
    I who[BLOCK], slot[BLOCK], n = 0;
    for (I r = 0; r < rows; r++)
      for (I k = 0; k < K; k++)
        if (chosen[r * K + k] == e) {
          memcpy(mine + n * L, z + r * L, L * sizeof(float));
          who[n] = r;
          slot[n++] = r * K + k;
        }
    if (!n) continue;
    linear(mine, L, l->w1 + e * F * L, 0, gate, F, n, F, L);
    linear(mine, L, l->w3 + e * F * L, 0, up, F, n, F, L);
    MAP(n * F, gate, gate, activate(m, e, at(up, i_, n_)));
    quantise(m, gate, n * F);
    linear(gate, F, l->w2 + e * L * F, 0, y, L, n, L, F);
    for (I i = 0; i < n; i++)
      for (I j = 0; j < L; j++) sum[who[i] * L + j] += weights[slot[i]] * y[i * L + j];
  }
  if (l->latent_up) {
    for (I r = 0; r < rows; r++) rmsnorm(sum + r * L, l->latent_norm, sum + r * L, L, m->eps);
    linear(sum, L, l->latent_up, 0, out, D, rows, D, L);
  } else {
    memcpy(out, sum, rows * D * sizeof(float));
  }
  if (l->F) {
    dense(m, l, h, rows, y = rest, rest + rows * D + LANES);
    for (I j = 0; j < rows * D; j++) out[j] += y[j];
  }
}

#endif
