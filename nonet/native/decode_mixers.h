/* The token mixers, one position per row: out[rows][D] from h[rows][D]. Layouts are those of model/state.py; formulas
   those of model/attention.py and model/kda.py. */

#ifndef NONET_MIXERS_H
#define NONET_MIXERS_H

#include "decode_model.h"

static void rotate(float *x, const float *cos, const float *sin, I K) {
  for (I i = 0; i < K / 2; i++) {
    float a = x[i], b = x[i + K / 2];
    x[i] = a * cos[i] + b * sin[i];
    x[i + K / 2] = b * cos[i + K / 2] + a * sin[i + K / 2];
  }
}

static void gqa(const Model *m, const Layer *l, const float *h, I rows, I first, const Rows *where, float *out,
                float *s) {
  I H = m->H, G = m->G, K = m->K, D = m->D, head = PAGE * K, page = G * head;
  float *q = s, *k = q + rows * H * K, *v = k + rows * G * K, *o = v + rows * G * K, *w = o + rows * H * K;
  linear(h, D, l->q, l->q_b, q, H * K, rows, H * K, D);
  linear(h, D, l->k, l->k_b, k, G * K, rows, G * K, D);
  linear(h, D, l->v, l->v_b, v, G * K, rows, G * K, D);
  for (I r = 0; r < rows; r++) {
    I b = first + r, L = where->lengths[b], after = b + 1 < where->B ? b + 1 : b;
    const I *table = table_of(where, b);
    for (I j = 0; j < H + G; j++) {
      float *x = j < H ? q + (r * H + j) * K : k + (r * G + j - H) * K;
      const float *norm = j < H ? l->q_norm : l->k_norm;
      if (norm) rmsnorm(x, norm, x, K, m->eps);
      if (where->cos) rotate(x, where->cos + b * K, where->sin + b * K, K);
    }
    for (I g = 0; g < G; g++) {
      I at = table[L / PAGE] * page + g * head + L % PAGE * K;
      memcpy(l->pool + at, k + (r * G + g) * K, K * sizeof(float));
      memcpy(l->pool2 + at, v + (r * G + g) * K, K * sizeof(float));
      Paged keys = {l->pool + g * head, table, page, K}, values = {l->pool2 + g * head, table, page, K};
      Paged next = {l->pool + (g + 1) * head, table, page, K};
      if (g + 1 == G) next = (Paged){l->pool, table_of(where, after), page, K};
      for (I j = g * (H / G); j < (g + 1) * (H / G); j++)
        attend(q + (r * H + j) * K, keys, K, values, K, o + (r * H + j) * K, L + 1, 1.0f / sqrtf(K), w, next);
    }
  }
  linear(o, H * K, l->o, l->o_b, out, D, rows, D, H * K);
}

/* Convolve one channel group with its remembered inputs, apply SiLU, shift the memory. tail: [kernel-1][stride]. */
static void convolve(float *x, const float *taps, float *tail, I stride, I width, I kernel) {
  for (I c = 0; c < width; c++) {
    float y = x[c] * taps[c * kernel + kernel - 1];
    for (I j = 0; j < kernel - 1; j++) y += tail[j * stride + c] * taps[c * kernel + j];
    for (I j = 0; j < kernel - 2; j++) tail[j * stride + c] = tail[(j + 1) * stride + c];
    tail[(kernel - 2) * stride + c] = x[c];
    x[c] = y;
  }
  MAP(width, x, x, e * vsigmoid(e));
}

static void kda_head(const float *q, const float *k, const float *v, const float *g, float beta, float *S, float *o,
                     I K) {
  float a[K], read[K];
  MAP(K, g, a, vexp(e));
  memset(read, 0, sizeof read);
  for (I i = 0; i < K; i++)
    for (I j = 0; j < K; j++) {
      S[i * K + j] *= a[i];
      read[j] += k[i] * S[i * K + j];
    }
  memset(o, 0, K * sizeof(float));
  for (I j = 0; j < K; j++) read[j] = (v[j] - read[j]) * beta;
  for (I i = 0; i < K; i++)
    for (I j = 0; j < K; j++) {
      S[i * K + j] += k[i] * read[j];
      o[j] += q[i] * S[i * K + j];
    }
}

static void l2_normalise(float *x, I K, float scale) {
  float r = scale / sqrtf(dot(x, x, K) + 1e-6f);
  for (I i = 0; i < K; i++) x[i] *= r;
}

/* log(1 + e^x), as torch has it: x itself from 20 on. */
static void softplus(float *x, I n) {
  for (I i = 0; i < n; i++) x[i] = x[i] > 20.0f ? x[i] : log1pf(expf(x[i]));
}

static void kda(const Model *m, const Layer *l, const float *h, I rows, I first, const Rows *where, float *out,
                float *s) {
  I H = m->H, K = m->KK, C = H * K, D = m->D, past = m->kernel - 1;
  float *q = s, *k = q + rows * C, *v = k + rows * C, *g = v + rows * C, *o = g + rows * C, *gate = o + rows * C;
  float *low = gate + rows * C, *beta = low + rows * (m->rank > m->gate_rank ? m->rank : m->gate_rank);
  linear(h, D, l->q, 0, q, C, rows, C, D);
  linear(h, D, l->k, 0, k, C, rows, C, D);
  linear(h, D, l->v, 0, v, C, rows, C, D);
  if (m->gate_rank) {
    linear(h, D, l->g_a, 0, low, m->gate_rank, rows, m->gate_rank, D);
    linear(low, m->gate_rank, l->g, 0, gate, C, rows, C, m->gate_rank);
  } else {
    linear(h, D, l->g, 0, gate, C, rows, C, D);
  }
  linear(h, D, l->f_a, 0, low, m->rank, rows, m->rank, D);
  linear(low, m->rank, l->f_b, 0, g, C, rows, C, m->rank);
  linear(h, D, l->beta, 0, beta, H, rows, H, D);
  MAP(rows * H, beta, beta, vsigmoid(e));
  for (I r = 0; r < rows; r++) {
    I slot = where->slots[first + r];
    float *tail = l->pool2 + slot * past * 3 * C, *gr = g + r * C;
    convolve(q + r * C, l->q_conv, tail, 3 * C, C, m->kernel);
    convolve(k + r * C, l->k_conv, tail + C, 3 * C, C, m->kernel);
    convolve(v + r * C, l->v_conv, tail + 2 * C, 3 * C, C, m->kernel);
    if (m->softplus) {
      for (I c = 0; c < C; c++) gr[c] += l->dt[c];
      softplus(gr, C);
      for (I c = 0; c < C; c++) gr[c] *= -l->decay[c / K];
    } else {
      for (I c = 0; c < C; c++) gr[c] = (gr[c] + l->dt[c]) * l->decay[c / K];
      MAP(C, gr, gr, m->lower * vsigmoid(e));
    }
    for (I j = 0; j < H; j++) {
      I i = r * C + j * K;
      l2_normalise(q + i, K, 1.0f / sqrtf(K));
      l2_normalise(k + i, K, 1.0f);
      kda_head(q + i, k + i, v + i, g + i, beta[r * H + j], l->pool + (slot * H + j) * K * K, o + i, K);
      rmsnorm(o + i, l->o_norm, o + i, K, m->eps);
    }
  }
  MAP(rows * C, gate, gate, vsigmoid(e) * at(o, i_, n_));
  linear(gate, C, l->o, 0, out, D, rows, D, C);
}

static void mla(const Model *m, const Layer *l, const float *h, I rows, I first, const Rows *where, float *out,
                float *s) {
  I H = m->H, R = m->R, E = m->extra, N = m->nope, VD = m->VD, D = m->D, T = R + E;
  float *low = s, *q = low + rows * m->q_rank, *kv = q + rows * H * (N + E), *gate = kv + rows * T;
  float *o = gate + rows * H * VD, *query = o + rows * H * VD + LANES, *mixed = query + T, *w = mixed + R + LANES;
  if (m->q_rank) {
    linear(h, D, l->q_a, 0, low, m->q_rank, rows, m->q_rank, D);
    for (I r = 0; r < rows; r++) rmsnorm(low + r * m->q_rank, l->q_a_norm, low + r * m->q_rank, m->q_rank, m->mla_eps);
    linear(low, m->q_rank, l->q_bb, 0, q, H * (N + E), rows, H * (N + E), m->q_rank);
  } else {
    linear(h, D, l->q, 0, q, H * (N + E), rows, H * (N + E), D);
  }
  linear(h, D, l->kv_a, 0, kv, T, rows, T, D);
  if (l->g) linear(h, D, l->g, 0, gate, H * VD, rows, H * VD, D);
  for (I r = 0; r < rows; r++) {
    I L = where->lengths[first + r];
    Paged latents = {l->pool, table_of(where, first + r), PAGE * T, T};
    rmsnorm(kv + r * T, l->kv_a_norm, kv + r * T, R, m->mla_eps);
    memcpy(l->pool + latents.table[L / PAGE] * PAGE * T + L % PAGE * T, kv + r * T, T * sizeof(float));
    for (I j = 0; j < H; j++) {
      const float *qj = q + (r * H + j) * (N + E), *wk = l->kv_b + j * (N + VD) * R, *wv = wk + N * R;
      memset(query, 0, R * sizeof(float));
      for (I n = 0; n < N; n++)
        for (I i = 0; i < R; i++) query[i] += qj[n] * wk[n * R + i];
      memcpy(query + R, qj + N, E * sizeof(float));
      attend(query, latents, T, latents, R, mixed, L + 1, 1.0f / sqrtf(N + E), w, latents);
      matvec(mixed, wv, R, o + (r * H + j) * VD, VD, R);
    }
  }
  if (l->g) MAP(rows * H * VD, o, o, vsigmoid(at(gate, i_, n_)) * e);
  linear(o, H * VD, l->o, 0, out, D, rows, D, H * VD);
}

#endif
