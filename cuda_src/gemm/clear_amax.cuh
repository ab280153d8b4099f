// The amax of a product without rows or columns, and before maxima are taken into it.
#pragma once

KERNEL(1) clear_amax(float* amax) {
    grid_dependency_launch();
    grid_dependency_wait();
    *amax = 0.0f;
}
