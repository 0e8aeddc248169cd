//! Polynomials over GF(2) modulo the generator of CRC32C: `n` bytes behind others multiply the CRC of these by
//! x^8n. Reflected: the highest bit is the coefficient of x^0.

const GENERATOR: u32 = 0x82F6_3B78;

/// x^0.
pub const ONE: u32 = 1 << 31;

/// The product of both.
pub fn times(one: u32, mut other: u32) -> u32 {
    let mut sum = 0;
    for bit in (0..32).rev() {
        sum ^= other & (one >> bit & 1).wrapping_neg();
        other = times_x(other);
    }
    sum
}

/// The product with x.
pub fn times_x(value: u32) -> u32 {
    value >> 1 ^ GENERATOR & (value & 1).wrapping_neg()
}

/// x to a power.
pub fn power(mut exponent: u64) -> u32 {
    let (mut result, mut square) = (ONE, times_x(ONE));
    while exponent > 0 {
        if exponent & 1 == 1 {
            result = times(result, square);
        }
        square = times(square, square);
        exponent >>= 1;
    }
    result
}
