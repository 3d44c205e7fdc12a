#!/bin/bash
tr " " "\n" < list.txt | sort > sorted.txt
