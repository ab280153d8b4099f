// Sets amax to 0: for a product without rows or columns, and before kernels that raise it by atomic maxima.
#pragma once

KERNEL(1) clear_amax(float* amax) {
    grid_dependency_launch();
    grid_dependency_wait();
    *amax = 0.0f;
}
