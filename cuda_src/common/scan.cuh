// Scans and ranks among the lanes of a warp.
#pragma once

DEVICE int max_int(int x, int y) { return x > y ? x : y; }
DEVICE int sum_int(int x, int y) { return x + y; }

// The inclusive maximum, or sum, of the lanes up to this one.
template <class Of>
DEVICE int scan_warp(int x, const Of& of) {
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) {
        const int before = (int)shuffle_from((unsigned)x, (lane() - step) % WARP);
        if ((int)lane() >= step) x = of(before, x);
    }
    return x;
}
// The same of the lanes before this one; 0 for the first.
template <class Of>
DEVICE int scan_warp_before(int x, const Of& of) {
    const int before = (int)shuffle_from((unsigned)scan_warp(x, of), (lane() - 1) % WARP);
    return lane() == 0 ? 0 : before;
}

// The lanes before this one.
DEVICE Lanes lanes_before() { return (Lanes(1) << lane()) - 1; }

// The lanes that hold the same number, of `bits` bits, among those that `take` part. Every lane of the warp calls it.
template <int bits>
DEVICE Lanes lanes_of_same(int number, bool take) {
    Lanes same = lanes_where(take);
#pragma unroll
    for (int bit = 0; bit < bits; ++bit) {
        const bool set = number >> bit & 1;
        const Lanes others = lanes_where(set);
        same &= set ? others : ~others;
    }
    return same;
}
