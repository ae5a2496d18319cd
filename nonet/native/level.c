/* Which level of x86-64 this processor and its system have: 4 (AVX-512), 3 (AVX2 and FMA), or 0 for neither. */

int processor_level(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  int three = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
              __builtin_cpu_supports("bmi2");
  int four = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
             __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
             __builtin_cpu_supports("avx512vl");
  return three ? (four ? 4 : 3) : 0;
#else
  return 0;
#endif
}
