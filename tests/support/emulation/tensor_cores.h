// wgmma: products that a warpgroup issues and awaits in groups. Each thread computes its own results when it awaits
// them. Until then the operands of its warp may not be written, nor its sums accessed.
//
// In d[4 * j + 2 * half + {0, 1}], thread t of the 128 holds columns 8 * j + t % 4 * 2 + {0, 1} of row
// (t / 32) * 16 + (t % 32) / 4 + 8 * half. Sums over 32 columns are float64.
#pragma once
#include "copies.h"

#include <cmath>

namespace {

constexpr const char *PRODUCT = "a product";

// The values of all codes of e4m3fn and e5m2.
struct Codes {
    double of[2][256];
    Codes() {
        for (int e5m2 = 0; e5m2 < 2; e5m2++)
            for (int code = 0; code < 256; code++) {
                const int fraction = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7, rest = code & ((1 << fraction) - 1);
                const int exponent = (code & 0x7F) >> fraction;
                double size = exponent ? std::ldexp((1 << fraction) + rest, exponent - bias - fraction)
                                       : std::ldexp(rest, 1 - bias - fraction);
                if (e5m2 ? exponent == 31 : (code & 0x7F) == 0x7F) size = e5m2 && !rest ? INFINITY : NAN;
                of[e5m2][code] = code & 0x80 ? -size : size;
            }
    }
} const codes;

void decode_row(double (&into)[32], unsigned address, int format) {
    const Block &block = *current->block;
    for (unsigned k = 0; k < 32; k += 16) {
        const unsigned char *from = memory_at(block, shared_index(swizzled(address + k, 128)));
        for (unsigned i = 0; i < 16; i++) into[k + i] = codes.of[format][from[i]];
    }
}

void multiply(const Product &p, std::vector<float> &sums) {
    const unsigned thread = current->known.thread.x % 128, row = thread / 32 * 16 + thread % 32 / 4;
    double a[2][32], b[32];
    for (unsigned half = 0; half < 2; half++)
        if (!p.w) decode_row(a[half], p.a + (row + half * 8) * 128, p.a_format);
        else
            for (unsigned k = 0; k < 32; k++) a[half][k] = codes.of[p.a_format][p.rows[half][k]];
    for (unsigned i = 0; i < sums.size(); i += 4)
        for (unsigned j = 0; j < 2; j++) {
            decode_row(b, p.b + (i / 4 * 8 + thread % 4 * 2 + j) * 128, p.b_format);
            double sum[2] = {};
            for (unsigned k = 0; k < 32; k++)
                for (unsigned half = 0; half < 2; half++) sum[half] += a[half][k] * b[k];
            for (unsigned half = 0; half < 2; half++) {
                float &d = sums[i + 2 * half + j];
                d = static_cast<float>((p.keep ? d : 0.0f) + sum[half]);
            }
        }
}

// Called by one lane of a warp: checks that an operand may be read, and marks it as being read from now on.
void begin_operand(unsigned address, unsigned rows, uintptr_t site) {
    if (address + rows * 128 > DYNAMIC + launch->shared_bytes || address < DYNAMIC)
        fail(site, "a product of %u rows at %#x, which are not all in dynamic shared memory", rows, address);
    const Block &block = *current->block;
    for (unsigned row = 0; row < rows; row++)
        for (unsigned k = 0; k < 32; k += 16)
            check_proxy_read(block, shared_index(swizzled(address + row * 128 + k, 128)), 16, true, PRODUCT, site);
    const size_t first = shared_index(address / 128 * 128);
    begin_read(first, first + rows * 128, PRODUCT, current->products + 1);
}

void finish_product(Thread &t, const Product &p, uintptr_t site) {
    if (p.w && memcmp(p.w, p.held, sizeof p.held)) fail(site, "writes registers that a product reads");
    if (p.w && clocked) t.clock.used[t.index] = std::max(t.clock.used[t.index], static_cast<int32_t>(p.began));
    for (Sums &s : t.sums)
        if (s.at == p.into) {
            multiply(p, s.value);
            s.pending--;
        }
}

void finish_products(uint32_t group, uintptr_t site) {
    Thread &t = *current;
    size_t done = 0;
    while (done < t.issued.size() && t.issued[done].group <= group) finish_product(t, t.issued[done++], site);
    t.issued.erase(t.issued.begin(), t.issued.begin() + static_cast<long>(done));
    for (Sums &s : t.sums) {
        for (size_t i = 0; i < s.value.size(); i++)
            if (memcmp(&s.at[i], &EMULATED_POISONED_SUM, sizeof EMULATED_POISONED_SUM)) fail(site, "writes sums into which a product is under way");
        if (!s.pending) memcpy(s.at, s.value.data(), s.value.size() * sizeof(float));
    }
    t.sums.erase(std::remove_if(t.sums.begin(), t.sums.end(), [](const Sums &s) { return !s.pending; }), t.sums.end());
    end_reads(PRODUCT, group);
}

void issue(int sums, Product made, uintptr_t site) {
    Thread &self = *current;
    float *const d = made.into;
    enter(site);
    if (!self.products_fenced) fail(site, "a product whose registers no wgmma.fence orders after the last wait");
    if (self.known.lane == 0) begin_operand(made.b, 2 * static_cast<unsigned>(sums), site);
    auto into = std::find_if(self.sums.begin(), self.sums.end(), [&](const Sums &s) { return s.at == d; });
    if (into == self.sums.end()) {
        self.sums.push_back({d, std::vector<float>(d, d + sums), 0});
        into = self.sums.end() - 1;
        for (int i = 0; i < sums; i++) memcpy(d + i, &EMULATED_POISONED_SUM, sizeof EMULATED_POISONED_SUM);
    }
    into->pending++;
    made.group = self.products + 1;
    self.issued.push_back(made);
}

}  // namespace

extern "C" {

void emulation_products_fence() { current->products_fenced = true; }

void emulation_product(float *d, int sums, unsigned a, unsigned b, int keep, int a_format, int b_format) {
    enter(SITE);
    if (current->known.lane == 0) begin_operand(a + current->known.thread.x % 128 / 32 * 16 * 128, 16, SITE);
    issue(sums, {d, a, b, a_format, b_format, keep}, SITE);
}
void emulation_product_of_rows(float *d, int sums, const unsigned *w, const unsigned *rows, unsigned b, int keep, int a_format,
                               int b_format) {
    Product made = {d, 0, b, a_format, b_format, keep, 0, w};
    memcpy(made.held, w, sizeof made.held);
    memcpy(made.rows, rows, sizeof made.rows);
    made.began = now++;
    issue(sums, made, SITE);
}
void emulation_products_commit() {
    current->products++;
    give_way();
}
void emulation_products_wait(int pending) {
    Thread &self = *current;
    enter(SITE);
    give_way();
    self.products_fenced = false;
    if (static_cast<int64_t>(self.products) > pending) finish_products(self.products - static_cast<uint32_t>(pending), SITE);
}

}  // extern "C"
