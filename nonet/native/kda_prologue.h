/* What stands in front of the KDA scan, per head: causal convolution of 4 taps and SiLU, L2 norm of q and k, activation
   of the decay and of beta. Forward and gradients by hand.

     y_t = sum over j < 4 of taps_j x_{t-3+j}      s = y sigmoid(y)      q = scale s / sqrt(|s|^2 + 1e-6), k alike
     g = lower sigmoid(a (z + bias)), a = exp(A_log)                     beta = sigmoid(b)

   In front of a sequence stand three remembered inputs (tail), or zeros. Heads and parts (q, k, v, gates) in parallel,
   sequences in turn, so that a parameter's gradient is summed in one order whatever the number of threads. */

enum { TAPS = 4, PAST = TAPS - 1, EARLY = 6 }; /* EARLY: positions between asking for memory and using it */
#define L2_EPS ((REAL)1e-6)

typedef struct {
  const REAL *x[3];      /* q, k, v projections [B][T][H K] */
  I x_b[3], x_t[3];
  const REAL *taps;      /* [3][4][H K] */
  const REAL *tail;      /* [N][3][3 H K] or null */
  const REAL *z, *b;     /* decay logits [B][T][H K], or null: no decay; beta logits [B][T][H] */
  I z_b, z_t, b_b, b_t;
  const REAL *a, *bias;  /* [H], [H K] */
  const REAL *constants; /* lower bound, scale of q */
  const I *sequences;    /* [N][3]: row, first position, positions */
  REAL *out[3], *g, *beta, *end; /* [B][T][H K] each; [B][T][H]; tail behind each sequence [N][3][3 H K] */
  I N, T, H, K, threads;
} Prologue;

typedef struct {
  Prologue f;            /* out, g, beta and end are not used */
  const REAL *d_out[3], *d_g, *d_beta, *d_end; /* contiguous; d_end may be null */
  REAL *dx[3], *dtaps, *dtail, *dz, *db, *da, *dbias; /* [3][4][H K]; [N][3][3 H K] or null; the rest as the inputs */
} PrologueBack;

/* Where one part of one head of one sequence finds its inputs; position -3 .. -1 are the tail. */
typedef struct {
  const REAL *x, *tail;
  I stride, tail_stride;
} Source;

static const REAL zeros[256];

static Source source_of(const Prologue *f, I n, int part, I h) {
  const I *at = f->sequences + 3 * n, C = f->H * f->K;
  Source s = {f->x[part] + at[0] * f->x_b[part] + at[1] * f->x_t[part] + h * f->K, 0, f->x_t[part], 3 * C};
  if (f->tail) s.tail = f->tail + n * PAST * 3 * C + part * C + h * f->K;
  return s;
}

static INLINE const REAL *input(const Source *s, I t) {
  if (t >= 0) return s->x + t * s->stride;
  return s->tail ? s->tail + (t + PAST) * s->tail_stride : zeros;
}

/* taps [4][K] of one part and head */
static INLINE const REAL *taps_of(const Prologue *f, int part, I h) {
  return f->taps + part * TAPS * f->H * f->K + h * f->K;
}

static INLINE V convolved(const REAL *const *row, const REAL *taps, I C, I i) {
  V y = load(row[0] + i) * load(taps + i);
#pragma GCC unroll 3
  for (int j = 1; j < TAPS; j++) y += load(row[j] + i) * load(taps + j * C + i);
  return y;
}

static void convolve_head(const Prologue *f, I n, int part, I h) {
  const I *at = f->sequences + 3 * n, K = f->K, C = f->H * K, count = at[2];
  const Source s = source_of(f, n, part, h);
  const REAL *taps = taps_of(f, part, h), scale = part == 0 ? f->constants[1] : 1;
  REAL *out = f->out[part] + (at[0] * f->T + at[1]) * C + h * K;
  for (I t = 0; t < count; t++, out += C) {
    const REAL *row[TAPS] = {input(&s, t - 3), input(&s, t - 2), input(&s, t - 1), input(&s, t)};
    V squares = {0};
    for (I i = 0; i < K; i += LANES) {
      V y = convolved(row, taps, C, i), silu = y * vsigmoid(y);
      fetch(s.x + (t + EARLY) * s.stride + i);
      fetch_to_write(out + EARLY * C + i);
      squares += silu * silu;
      store(out + i, silu);
    }
    if (part == 2) continue;
    const REAL r = scale / (REAL)sqrt(sum(squares) + L2_EPS);
    for (I i = 0; i < K; i += LANES) store(out + i, load(out + i) * r);
  }
  REAL *end = f->end + n * PAST * 3 * C + part * C + h * K;
  for (int j = 0; j < PAST; j++) memcpy(end + j * 3 * C, input(&s, count - PAST + j), K * sizeof(REAL));
}

static void gate_head(const Prologue *f, I n, I h) {
  const I *at = f->sequences + 3 * n, K = f->K, C = f->H * K;
  const REAL a = f->a[h], lower = f->constants[0];
  for (I t = 0; t < at[2]; t++) {
    const I place = at[0] * f->T + at[1] + t;
    const REAL b = f->b[at[0] * f->b_b + (at[1] + t) * f->b_t + h];
    f->beta[place * f->H + h] = (REAL)1 / ((REAL)1 + (REAL)exp(-b));
    REAL *g = f->g + place * C + h * K;
    if (!f->z) {
      memset(g, 0, K * sizeof(REAL));
      continue;
    }
    const REAL *z = f->z + at[0] * f->z_b + (at[1] + t) * f->z_t + h * K;
    for (I i = 0; i < K; i += LANES) {
      fetch(z + EARLY * f->z_t + i);
      fetch_to_write(g + EARLY * C + i);
      store(g + i, lower * vsigmoid(a * (load(z + i) + load(f->bias + h * K + i))));
    }
  }
}

int NAME(kda_prologue)(const Prologue *f) {
  const I items = 4 * f->H;
#pragma omp parallel num_threads(f->threads) if (f->threads > 1)
  {
    unsigned before = flush_denormals();
#pragma omp for schedule(dynamic)
    for (I i = 0; i < items; i++)
      for (I n = 0; n < f->N; n++)
        if (i % 4 < 3) convolve_head(f, n, i % 4, i / 4);
        else gate_head(f, n, i / 4);
    restore(before);
  }
  return 0;
}

/* ------------------------------------------------------------------------------------------------------- gradients */

/* dy [K] of one position from the gradient of its output. y and s are made again. */
static INLINE void activate_back(const REAL *const *row, const REAL *taps, I C, I K, const REAL *d_out, int part,
                                 REAL scale, REAL *dy, REAL *silu) {
  V squares = {0}, along = {0};
  for (I i = 0; i < K; i += LANES) {
    V y = convolved(row, taps, C, i), p = vsigmoid(y), s = y * p;
    squares += s * s;
    along += s * load(d_out + i);
    store(silu + i, s);
    store(dy + i, p + s * ((REAL)1 - p)); /* the derivative of y sigmoid(y) */
  }
  REAL r = 1, back = 0;
  if (part < 2) {
    r = (REAL)1 / (REAL)sqrt(sum(squares) + L2_EPS);
    back = r * r * sum(along);
    r *= scale;
  }
  for (I i = 0; i < K; i += LANES) store(dy + i, load(dy + i) * (r * (load(d_out + i) - load(silu + i) * back)));
}

static void convolve_head_back(const PrologueBack *p, I n, int part, I h) {
  const Prologue *f = &p->f;
  const I *at = f->sequences + 3 * n, K = f->K, C = f->H * K, count = at[2];
  const Source s = source_of(f, n, part, h);
  const REAL *taps = taps_of(f, part, h), scale = part == 0 ? f->constants[1] : 1;
  REAL *dtaps = p->dtaps + part * TAPS * C + h * K, silu[256], ring[TAPS][256], sums[TAPS][256];
  const I place = (at[0] * f->T + at[1]) * C + h * K, tail = n * PAST * 3 * C + part * C + h * K;
  memset(ring, 0, sizeof ring);
  memset(sums, 0, sizeof sums);
  /* dx of position t - 3 is known once dy of t is; dy behind the end is zero. */
  for (I t = 0; t < count + PAST; t++) {
    REAL *dy = ring[t % TAPS];
    if (t < count) {
      const REAL *row[TAPS] = {input(&s, t - 3), input(&s, t - 2), input(&s, t - 1), input(&s, t)};
      for (I i = 0; i < K; i += LANES) {
        fetch(s.x + (t + EARLY) * s.stride + i);
        fetch(p->d_out[part] + place + (t + EARLY) * C + i);
        fetch_to_write(p->dx[part] + place + (t + EARLY - PAST) * C + i);
      }
      activate_back(row, taps, C, K, p->d_out[part] + place + t * C, part, scale, dy, silu);
      for (int j = 0; j < TAPS; j++)
        for (I i = 0; i < K; i += LANES) store(sums[j] + i, load(sums[j] + i) + load(dy + i) * load(row[j] + i));
    } else {
      memset(dy, 0, K * sizeof(REAL));
    }
    const I back = t - PAST;
    REAL *dx = back >= 0 ? p->dx[part] + place + back * C : p->dtail ? p->dtail + tail + (back + PAST) * 3 * C : 0;
    if (!dx) continue;
    const REAL *kept = p->d_end && back >= count - PAST ? p->d_end + tail + (back - count + PAST) * 3 * C : zeros;
    for (I i = 0; i < K; i += LANES) {
      V d = load(kept + i);
#pragma GCC unroll 4
      for (int j = 0; j < TAPS; j++) d += load(taps + j * C + i) * load(ring[(t + TAPS - j) % TAPS] + i);
      store(dx + i, d);
    }
  }
  for (int j = 0; j < TAPS; j++)
    for (I i = 0; i < K; i += LANES) store(dtaps + j * C + i, load(dtaps + j * C + i) + load(sums[j] + i));
}

static void gate_head_back(const PrologueBack *p, I n, I h) {
  const Prologue *f = &p->f;
  const I *at = f->sequences + 3 * n, K = f->K, C = f->H * K;
  const REAL a = f->a[h], lower = f->constants[0];
  V da = {0};
  REAL sums[256];
  memset(sums, 0, sizeof sums);
  for (I t = 0; t < at[2]; t++) {
    const I place = at[0] * f->T + at[1] + t;
    const REAL b = f->b[at[0] * f->b_b + (at[1] + t) * f->b_t + h], beta = (REAL)1 / ((REAL)1 + (REAL)exp(-b));
    p->db[place * f->H + h] = p->d_beta[place * f->H + h] * beta * ((REAL)1 - beta);
    if (!f->z) continue;
    const REAL *z = f->z + at[0] * f->z_b + (at[1] + t) * f->z_t + h * K, *dg = p->d_g + place * C + h * K;
    for (I i = 0; i < K; i += LANES) {
      fetch(z + EARLY * f->z_t + i);
      fetch(dg + EARLY * C + i);
      fetch_to_write(p->dz + (place + EARLY) * C + h * K + i);
      V shifted = load(z + i) + load(f->bias + h * K + i), s = vsigmoid(a * shifted);
      V dz = load(dg + i) * (a * lower) * (s * ((REAL)1 - s));
      store(p->dz + place * C + h * K + i, dz);
      store(sums + i, load(sums + i) + dz);
      da += dz * shifted;
    }
  }
  p->da[h] += sum(da); /* of A_log: a d(a) */
  for (I i = 0; i < K; i += LANES) store(p->dbias + h * K + i, load(p->dbias + h * K + i) + load(sums + i));
}

/* dtaps, da and dbias are added to: zero them first. */
int NAME(kda_prologue_back)(const PrologueBack *p) {
  const Prologue *f = &p->f;
  const I items = 4 * f->H;
#pragma omp parallel num_threads(f->threads) if (f->threads > 1)
  {
    unsigned before = flush_denormals();
#pragma omp for schedule(dynamic)
    for (I i = 0; i < items; i++)
      for (I n = 0; n < f->N; n++)
        if (i % 4 < 3) convolve_head_back(p, n, i % 4, i / 4);
        else gate_head_back(p, n, i / 4);
    restore(before);
  }
  return 0;
}
