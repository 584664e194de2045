import sys

numbers = [float(line) for line in sys.stdin]
numbers.sort(key=str)
print(numbers[len(numbers) // 2])
