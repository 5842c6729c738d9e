// Instruction sets that this compiler can be asked for one file at a time, whatever its -march.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define FLASH_CPU_HAS_AVX 1
#if defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define FLASH_CPU_HAS_AMX 1
#endif
#endif
