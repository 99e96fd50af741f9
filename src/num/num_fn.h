/* num_fn.h - how inline functions that CPU and GPU code share are declared. */
#ifndef NIBBLE_NUM_FN_H
#define NIBBLE_NUM_FN_H

#ifdef __CUDACC__
#define NUM_FN static __host__ __device__ __forceinline__
#else
#define NUM_FN static inline
#endif

#endif
