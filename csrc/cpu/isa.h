// Instruction sets that this compiler can target in a single file, whatever -march is.
#pragma once

#if defined(__x86_64__) && defined(__GNUC__)
#define FLASH_CPU_HAS_AVX 1
#if defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define FLASH_CPU_HAS_AMX 1
#endif
#endif
