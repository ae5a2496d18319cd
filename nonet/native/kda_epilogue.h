/* What stands behind the KDA scan: y = sigmoid(gate) o RMSNorm(o) per head, weight shared by the heads. */

typedef struct {
  const REAL *o, *gate, *weight; /* [R][H K] contiguous, [R][H K], [K] */
  I gate_r;                      /* stride of a row of gate */
  const REAL *eps;
  REAL *y;                       /* [R][H K] */
  const REAL *dy;                /* backward: contiguous */
  REAL *d_o, *dgate, *dweight;   /* backward: as o; [blocks][K], a partial sum for each BLOCK rows */
  I R, H, K, threads;
} Epilogue;

enum { BLOCK = 64 };

static INLINE REAL inverse_rms(const REAL *o, I K, REAL eps) {
  V squares = {0};
  for (I i = 0; i < K; i += LANES) squares += load(o + i) * load(o + i);
  return (REAL)1 / (REAL)sqrt(sum(squares) / K + eps);
}

static void gate_row(const Epilogue *f, I row) {
  for (I h = 0; h < f->H; h++) {
    const I at = (row * f->H + h) * f->K;
    const REAL *o = f->o + at, *gate = f->gate + row * f->gate_r + h * f->K, r = inverse_rms(o, f->K, *f->eps);
    for (I i = 0; i < f->K; i += LANES)
      store(f->y + at + i, load(o + i) * r * load(f->weight + i) * vsigmoid(load(gate + i)));
  }
}

/* With n = o r and s = sigmoid(gate): d(gate) = dy n w s (1 - s), dn = dy s w, dw += dy s n, do = r (dn - n mean(dn
   n)). */
static void gate_row_back(const Epilogue *f, I row, REAL *dweight) {
  const I K = f->K;
  for (I h = 0; h < f->H; h++) {
    const I at = (row * f->H + h) * K;
    const REAL *o = f->o + at, *gate = f->gate + row * f->gate_r + h * K, *dy = f->dy + at;
    const REAL r = inverse_rms(o, K, *f->eps);
    V along = {0};
    for (I i = 0; i < K; i += LANES) {
      V n = load(o + i) * r, s = vsigmoid(load(gate + i)), d = load(dy + i), w = load(f->weight + i);
      V dn = d * s * w;
      store(f->dgate + at + i, dn * n * ((REAL)1 - s));
      store(dweight + i, load(dweight + i) + d * s * n);
      store(f->d_o + at + i, dn);
      along += dn * n;
    }
    const REAL mean = sum(along) / K;
    for (I i = 0; i < K; i += LANES)
      store(f->d_o + at + i, r * (load(f->d_o + at + i) - load(o + i) * (r * mean)));
  }
}

static int epilogue(const Epilogue *f, const int back) {
  const I blocks = (f->R + BLOCK - 1) / BLOCK;
#pragma omp parallel num_threads(f->threads < blocks ? f->threads : blocks) if (f->threads > 1 && blocks > 1)
  {
    unsigned before = flush_denormals();
#pragma omp for schedule(static)
    for (I b = 0; b < blocks; b++)
      for (I row = b * BLOCK; row < f->R && row < (b + 1) * BLOCK; row++)
        if (back) gate_row_back(f, row, f->dweight + b * f->K);
        else gate_row(f, row);
    restore(before);
  }
  return 0;
}

int NAME(kda_epilogue)(const Epilogue *f) { return epilogue(f, 0); }
/* dweight must be zero. */
int NAME(kda_epilogue_back)(const Epilogue *f) { return epilogue(f, 1); }
