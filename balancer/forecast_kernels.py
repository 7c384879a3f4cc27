"""Kernels of the forecasters: the passes of the bank and the Kalman filters, one layer after the other.

Plain functions over arrays, which forecast.py compiles; bank.py and kalman.py have each of them in numpy,
with which these are compared. One file, because numba's cache on disk looks at the age of the entry's own
file. Loops run over the experts innermost, so that they become vector instructions. A loop that sums stores
nothing: whether its vector or its scalar code runs would else depend on where the arrays lie, and the last
digit of the sum with it.

K means, the first D + 1 of `order` being the reference and the regressors; R regressions; M members: means,
decay where fade >= 0, regressions.
"""

# numba reads these as types are met; annotations would say nothing that it checks
# pyright: basic
import numpy as np

ENTRIES = ("bank_learn", "bank_solve", "bank_mix", "level_filter", "trend_filter", "tally", "bands")
LEAST_SHARE = 1e-4  # as in bank.py
DIAGONAL = 1e-9
# as in conformal.py
LIVE_COPIES, LEAST_WIDTH = 1.0, 1e-12
NUM_BINS, LOW_CODE, CODE_SHIFT = 112, (127 - 6) * 8, 20


def bank_learn(level_KLE, theta_RLD, share_LE, order, fade):
    """Errors loss_ML and normal equations gram_LDD, moment_LD of one origin; fade < 0: no decay."""
    K, L, E = level_KLE.shape
    R, D = theta_RLD.shape[0], theta_RLD.shape[2]
    decays = 1 if fade >= 0.0 else 0
    loss_ML = np.empty((K + decays + R, L))
    gram_LDD = np.empty((L, D, D))
    moment_LD = np.empty((L, D))
    z_DE = np.empty((D, E))
    weighted_E = np.empty(E)
    forecast_E = np.empty(E)
    residual_E = np.empty(E)
    weight_E = np.empty(E)
    reference_E = np.empty(E)
    for layer in range(L):
        share_E = share_LE[layer]
        for k in range(K):
            error = 0.0
            for e in range(E):
                error += abs(level_KLE[k, layer, e] - share_E[e])
            loss_ML[k, layer] = 0.5 * error
        size = 1e-12
        for e in range(E):
            reference_E[e] = level_KLE[order[0], layer, e]
            residual_E[e] = share_E[e] - reference_E[e]
            weight_E[e] = 1.0 / np.sqrt(max(reference_E[e], LEAST_SHARE))
        for e in range(E):
            size += weight_E[e] * residual_E[e] * residual_E[e]
        for d in range(D):
            for e in range(E):
                z_DE[d, e] = level_KLE[order[d + 1], layer, e] - reference_E[e]
        if decays:
            error = 0.0
            for e in range(E):
                error += abs((1.0 - fade) * reference_E[e] + fade / E - share_E[e])
            loss_ML[K, layer] = 0.5 * error
        for r in range(R):
            total = regress(reference_E, z_DE, theta_RLD[r, layer], forecast_E)
            scale = 1.0 / total if total > 0.0 else 0.0
            even = 0.0 if total > 0.0 else 1.0 / E
            error = 0.0
            for e in range(E):
                error += abs(forecast_E[e] * scale + even - share_E[e])
            loss_ML[K + decays + r, layer] = 0.5 * error
        for d in range(D):
            moment = 0.0
            for e in range(E):
                weighted_E[e] = weight_E[e] * z_DE[d, e]
            for e in range(E):
                moment += weighted_E[e] * residual_E[e]
            moment_LD[layer, d] = moment / size
            for c in range(d + 1):
                product = 0.0
                for e in range(E):
                    product += weighted_E[e] * z_DE[c, e]
                gram_LDD[layer, d, c] = product / size
                gram_LDD[layer, c, d] = product / size
    return loss_ML, gram_LDD, moment_LD


def regress(reference_E, z_DE, theta_D, forecast_E):
    """Fill forecast_E with max(0, reference + theta z); return its sum."""
    for e in range(forecast_E.shape[0]):
        forecast_E[e] = reference_E[e]
    for d in range(theta_D.shape[0]):
        for e in range(forecast_E.shape[0]):
            forecast_E[e] += theta_D[d] * z_DE[d, e]
    total = 0.0
    for e in range(forecast_E.shape[0]):
        forecast_E[e] = max(forecast_E[e], 0.0)
    for e in range(forecast_E.shape[0]):
        total += forecast_E[e]
    return total


def bank_solve(gram_RLDD, moment_RLD, ridge):
    """theta_RLD of the ridge regressions, by Cholesky's method."""
    R, L, D = moment_RLD.shape
    theta_RLD = np.empty((R, L, D))
    low_DD = np.empty((D, D))
    scale_D = np.empty(D)
    for r in range(R):
        for layer in range(L):
            for d in range(D):
                scale_D[d] = 1.0 / np.sqrt(gram_RLDD[r, layer, d, d] + DIAGONAL)
            for d in range(D):
                for c in range(d + 1):
                    value = gram_RLDD[r, layer, d, c] * scale_D[d] * scale_D[c]
                    if d == c:
                        value += ridge
                    for b in range(c):
                        value -= low_DD[d, b] * low_DD[c, b]
                    if d == c:
                        low_DD[d, d] = np.sqrt(value)
                    else:
                        low_DD[d, c] = value / low_DD[c, c]
            for d in range(D):
                value = moment_RLD[r, layer, d] * scale_D[d]
                for c in range(d):
                    value -= low_DD[d, c] * theta_RLD[r, layer, c]
                theta_RLD[r, layer, d] = value / low_DD[d, d]
            for d in range(D - 1, -1, -1):
                value = theta_RLD[r, layer, d]
                for c in range(d + 1, D):
                    value -= low_DD[c, d] * theta_RLD[r, layer, c]
                theta_RLD[r, layer, d] = value / low_DD[d, d]
            for d in range(D):
                theta_RLD[r, layer, d] *= scale_D[d]
    return theta_RLD


def bank_mix(level_KLE, theta_RLD, weight_ML, order, fade):
    """Weighted mean [L, E] of the members; fade < 0: no decay."""
    K, L, E = level_KLE.shape
    R, D = theta_RLD.shape[0], theta_RLD.shape[2]
    decays = 1 if fade >= 0.0 else 0
    mean_LE = np.zeros((L, E))
    z_DE = np.empty((D, E))
    forecast_E = np.empty(E)
    for layer in range(L):
        mean_E = mean_LE[layer]
        reference_E = level_KLE[order[0], layer]
        for k in range(K):
            weight = weight_ML[k, layer]
            for e in range(E):
                mean_E[e] += weight * level_KLE[k, layer, e]
        if decays:
            weight = weight_ML[K, layer]
            for e in range(E):
                mean_E[e] += weight * ((1.0 - fade) * reference_E[e] + fade / E)
        for d in range(D):
            for e in range(E):
                z_DE[d, e] = level_KLE[order[d + 1], layer, e] - reference_E[e]
        for r in range(R):
            total = regress(reference_E, z_DE, theta_RLD[r, layer], forecast_E)
            weight = weight_ML[K + decays + r, layer]
            scale = weight / total if total > 0.0 else 0.0
            even = 0.0 if total > 0.0 else weight / E
            for e in range(E):
                mean_E[e] += forecast_E[e] * scale + even
        total = 0.0
        for e in range(E):
            total += mean_E[e]
        for e in range(E):
            mean_E[e] /= total
    return mean_LE


def level_filter(root_LE, level_LE, variance_LE, drift_LE, noise_LE, loaded_L):
    """One step of the local level filter, in place: level and its variance [L, E] of layers with load."""
    L, E = root_LE.shape
    for layer in range(L):
        if loaded_L[layer]:
            for e in range(E):
                before = variance_LE[layer, e] + drift_LE[layer, e]
                gain = before / (before + noise_LE[layer, e])
                level_LE[layer, e] += gain * (root_LE[layer, e] - level_LE[layer, e])
                variance_LE[layer, e] = (1.0 - gain) * before


def trend_filter(
    root_LE, level_LE, slope_LE, variance_3LE, drift_LE, slope_drift_LE, noise_LE, loaded_L, damping
):
    """One step of the damped local linear trend filter, in place.

    variance_3LE: of the level, of both together, of the slope.
    """
    L, E = root_LE.shape
    for layer in range(L):
        if loaded_L[layer]:
            for e in range(E):
                vl, vc, vs = variance_3LE[0, layer, e], variance_3LE[1, layer, e], variance_3LE[2, layer, e]
                level = level_LE[layer, e] + damping * slope_LE[layer, e]
                slope = damping * slope_LE[layer, e]
                pl = vl + 2.0 * damping * vc + damping * damping * vs + drift_LE[layer, e]
                pc = damping * vc + damping * damping * vs
                ps = damping * damping * vs + slope_drift_LE[layer, e]
                total = pl + noise_LE[layer, e]
                gain, slope_gain = pl / total, pc / total
                error = root_LE[layer, e] - level
                level_LE[layer, e] = level + gain * error
                slope_LE[layer, e] = slope + slope_gain * error
                variance_3LE[0, layer, e] = (1.0 - gain) * pl
                variance_3LE[1, layer, e] = (1.0 - gain) * pc
                variance_3LE[2, layer, e] = ps - slope_gain * pc


def tally(share_LE, root_LE, std_LE, reach, total_L, multiplier_L):
    """Scores of one origin, counted: count_LB, number_L, missed_L; total 0: a layer not counted."""
    L, E = share_LE.shape
    count_LB = np.zeros((L, NUM_BINS + 2))
    number_L = np.zeros(L)
    missed_L = np.zeros(L)
    score_E = np.empty(E)
    short_E = np.empty(E, dtype=np.float32)
    code_E = short_E.view(np.int32)
    for layer in range(L):
        total = total_L[layer]
        if total <= 0.0:
            continue
        for e in range(E):
            width = max(np.float64(std_LE[layer, e]) * reach, LEAST_WIDTH)
            score_E[e] = abs(np.sqrt(share_LE[layer, e]) - np.float64(root_LE[layer, e])) / width
            short_E[e] = np.float32(score_E[e])
        for e in range(E):
            root = np.float64(root_LE[layer, e])
            if root * root * total >= LIVE_COPIES:
                number_L[layer] += 1.0
                if score_E[e] > multiplier_L[layer]:
                    missed_L[layer] += 1.0
                place = (np.int64(code_E[e]) >> CODE_SHIFT) - LOW_CODE + 1
                count_LB[layer, min(max(place, 0), NUM_BINS + 1)] += 1.0
    return count_LB, number_L, missed_L


def bands(mean_HLE, std_LE, reach_H, multiplier_HL, normal):
    """Interval and standard deviation of the shares: low, high, std [H, L, E]."""
    H, L, E = mean_HLE.shape
    low_HLE = np.empty((H, L, E))
    high_HLE = np.empty((H, L, E))
    std_HLE = np.empty((H, L, E))
    for h in range(H):
        for layer in range(L):
            factor = multiplier_HL[h, layer] * reach_H[h]
            for e in range(E):
                mean = mean_HLE[h, layer, e]
                root, half = np.sqrt(mean), factor * std_LE[layer, e]
                var = (half / normal) * (half / normal)
                low, high = max(root - half, 0.0), min(root + half, 1.0)
                low_HLE[h, layer, e] = low * low
                high_HLE[h, layer, e] = high * high
                std_HLE[h, layer, e] = np.sqrt(4.0 * mean * var + 2.0 * var * var)
    return low_HLE, high_HLE, std_HLE
