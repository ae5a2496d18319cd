/* KDA in float64: kda32.c's text again, so that gradients can be checked to 1e-10. */

#define REAL double
#define REAL_BITS 64
#define NAME(f) f##_f64

#include "kda_vectors.h"

#include "kda_chunk.h"
#include "kda_forward.h"
#include "kda_backward.h"
#include "kda_step.h"
#include "kda_prologue.h"
#include "kda_epilogue.h"
