// What all kernels of the workspace share: names of types, shared memory, the generator.
//
// It is compiled by NVRTC, and by g++ over the stand-in of tests/emu, which defines
// __CUDA_ON_HOST__.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Shared memory whose size the launch says, as an array of T; once in a kernel.
#ifndef __CUDA_ON_HOST__
#define DYNAMIC_SHARED(T, name)                                     \
  extern __shared__ __align__(16) unsigned char dynamic_shared_bytes[]; \
  T* name = reinterpret_cast<T*>(dynamic_shared_bytes)
#endif

// Number of this thread among all of a launch in one direction.
__device__ __forceinline__ u64 thread_of_grid() {
  return (u64)blockIdx.x * blockDim.x + threadIdx.x;
}

// Philox4x32-10, bit for bit as the host's: four random words for a key and a counter of two halves.
struct PhiloxBlock {
  u32 word[4];
};
__device__ __forceinline__ PhiloxBlock philox(u64 key, u64 low, u64 high) {
  u32 c0 = (u32)low, c1 = (u32)(low >> 32), c2 = (u32)high, c3 = (u32)(high >> 32);
  u32 k0 = (u32)key, k1 = (u32)(key >> 32);
  for (int round = 0; round < 10; ++round) {
    const u64 p0 = (u64)0xD2511F53u * c0, p1 = (u64)0xCD9E8D57u * c2;
    c0 = (u32)(p1 >> 32) ^ c1 ^ k0;
    c2 = (u32)(p0 >> 32) ^ c3 ^ k1;
    c1 = (u32)p1;
    c3 = (u32)p0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}
