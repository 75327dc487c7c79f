/* Philox 4x32-10: rmm_linear/sketches/philox.py in compiled form, bit for bit.
 *
 * Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
 */
#include <stdint.h>

#include "variants.h"

/* counters: n. words: (4, n), each in [0, 2**32). */
VARIANTS void rmm_philox(int64_t seed, int64_t stream, int64_t n, const int64_t *counters, int64_t *words) {
    for (int64_t i = 0; i < n; i++) {
        uint64_t counter = (uint64_t)counters[i], c0 = (uint32_t)counter, c1 = counter >> 32, c2 = (uint32_t)stream, c3 = 0;
        uint32_t key_a = (uint32_t)seed, key_b = (uint32_t)((uint64_t)seed >> 32);
        for (int round = 0; round < 10; round++) {
            uint64_t a = c0 * 0xD2511F53u, b = c2 * 0xCD9E8D57u;
            c0 = (b >> 32) ^ c1 ^ key_a, c1 = (uint32_t)b;
            c2 = (a >> 32) ^ c3 ^ key_b, c3 = (uint32_t)a;
            key_a += 0x9E3779B9u, key_b += 0xBB67AE85u;
        }
        words[i] = (int64_t)c0, words[n + i] = (int64_t)c1;
        words[2 * n + i] = (int64_t)c2, words[3 * n + i] = (int64_t)c3;
    }
}
